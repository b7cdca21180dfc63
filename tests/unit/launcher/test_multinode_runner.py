"""The command lines of the launchers of several hosts."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path

import pytest

from deepspeed.launcher import multi_host as runners
from deepspeed.launcher.arguments import LAUNCHERS
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.runner import encode_world_info, parse_args

ACTIVE = {"h1": [0, 1], "h2": [0, 1]}
INFO = encode_world_info(ACTIVE)
SCRIPT = ["train.py", "--lr", "a b", "it's", "$x"]


def helper(name, *options):
    """The command of a rank: the helper with its options, and the script."""
    path = str(Path(runners.__file__).with_name("launcher_helper.py"))
    given = ["--launcher", name, "--enable_each_rank_log=None", "--log_level=info", *options]
    return [sys.executable, "-u", path, *given, *SCRIPT]


def made(kind, *words):
    return kind(parse_args(["--master_addr=1.2.3.4", *words, *SCRIPT]))


def command(kind, *words, exports=None, environment=None, active=ACTIVE):
    runner = made(kind, *words)
    for key, value in (exports or {}).items():
        runner.add_export(key, value)
    return runner.get_cmd({} if environment is None else environment, active)


def test_every_launcher_has_a_runner():
    assert {*LAUNCHERS} == {"ssh", *runners.RUNNERS}


def test_pdsh():
    environment = {"PDSH_SSH_ARGS_APPEND": "-F conf"}
    words = command(
        runners.PDSHRunner,
        *("--launcher_args=-q -v", "--venv_script=/v a/activate", "--ssh_port=222", "--bind_core_list=0-1", "--quiet"),
        exports={"A": "x y", "B": "plain", "C": '$q"%n'},
        environment=environment,
    )
    assert environment == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-F conf -p 222"}
    assert words[:8] == ["pdsh", "-S", "-f", "1024", "-w", "h1,h2", "-q", "-v"]
    line = " ".join(words[8:])  # as pdsh puts it together for the shell of a host
    assert line.startswith(
        f"source '/v a/activate'; export A='x y'; export B=plain; export C='$q\"%%n';  cd {os.getcwd()};"
    )
    launch = shlex.split(line.split("; ")[-1])[-len(SCRIPT) - 11 :]
    assert launch == [
        *("-u", "-m", "deepspeed.launcher.launch", f"--world_info={INFO}", "--node_rank=%n", "--master_addr=1.2.3.4"),
        *("--master_port=29500", "--enable_each_rank_log=None", "--bind_core_list=0-1", "--quiet", "--log_level=info"),
        *SCRIPT,
    ]


def test_openmpi():
    words = command(runners.OpenMPIRunner, "--hostfile=F", exports={"A": "x y"})
    mca = ["--mca", "btl", "^openib", "--mca", "btl_tcp_if_include", "eth0"]
    variables = ["-x", "UCX_TLS=tcp", "-x", "A=x y"]
    assert words == ["mpirun", "-n", "4", "-hostfile", "F", *mca, *variables, *helper("openmpi")]
    words = command(runners.OpenMPIRunner, "--launcher_args=--mca btl_tcp_if_include ib0", "--module")
    assert "eth0" not in words
    assert words[-len(SCRIPT) - 1 :] == ["--module", *SCRIPT]


def test_mpich():
    words = command(runners.MPICHRunner, "--launcher_args=-v", exports={"A": "x=y"})
    meet = "MASTER_ADDR 1.2.3.4 MASTER_PORT 29500 WORLD_SIZE 4 LOCAL_SIZE 2".split()
    genv = [word for key, value in zip(meet[::2], meet[1::2], strict=True) for word in ("-genv", key, value)]
    head = ["mpirun", "-n", "4", "-ppn", "2", "-v", "-genv", "A", "x=y", *genv, "-hosts", "h1,h2"]
    assert words == [*head, *helper("mpich")]
    assert command(runners.MPICHRunner, "--module")[-len(SCRIPT) - 1] == "--module"
    logged = command(runners.MPICHRunner, "--enable_each_rank_log=logs", "--quiet")
    assert {"--enable_each_rank_log=logs", "--log_level=error"} <= {*logged}
    uneven = command(runners.MPICHRunner, active={"h1": [0, 1], "h2": [0]})
    assert uneven[:4] == ["mpirun", "-n", "3", "-genv"]
    assert "h1:2,h2:1" in uneven
    assert "LOCAL_SIZE" not in uneven


def test_impi():
    words = command(runners.IMPIRunner, exports={"A": "x"})
    head, *blocks = " ".join(words).split(" : ")
    assert head.startswith(
        "mpirun -ppn 2 -genv A x -genv MASTER_ADDR 1.2.3.4 -genv MASTER_PORT 29500 -genv WORLD_SIZE 4"
    )
    assert "-genv I_MPI_PIN 0 -hosts h1,h2 -n 1 -env RANK 0 -env LOCAL_RANK 0 " in head
    run = " ".join(helper("impi"))
    assert blocks == [f"-n 1 -env RANK {n} -env LOCAL_RANK {n % 2} {run}" for n in (1, 2, 3)]


def test_slurm():
    words = command(runners.SlurmRunner, "--launcher_args=-v", "--include=h1@h2", exports={"A": "x y"})
    chosen = ["--nodelist", "h1,h2", "--nodes", "2"]
    assert words == ["srun", "-n", "4", "-v", *chosen, "--export=ALL,A=x y", *helper("slurm")]
    words = command(runners.SlurmRunner, "--num_nodes=2", "--num_gpus=2")
    assert words[3:8] == ["--nodes", "2", "--gpus-per-node", "2", "--export=ALL"]
    assert command(runners.SlurmRunner, "--no_python", "--num_nodes=2")[6:] == helper("slurm", "--no_python")


def test_slurm_places_ranks_by_a_file_of_its_own():
    runner, environment = made(runners.SlurmRunner), {}
    words = runner.get_cmd(environment, {"h1": [0, 1], "h2": [0]})
    assert words[:4] == ["srun", "--distribution=arbitrary", "-n", "3"]
    path = Path(environment["SLURM_HOSTFILE"])
    assert path.read_text() == "h1\nh1\nh2\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    del runner
    assert not path.exists()


def test_mvapich(recwarn):
    runner = made(runners.MVAPICHRunner)
    words = runner.get_cmd({}, ACTIVE)
    assert words[:6] == ["mpirun", "-np", "4", "-ppn", "2", "--hostfile"]
    assert Path(words[6]).read_text() == "h1\nh2\n"
    assert stat.S_IMODE(Path(words[6]).stat().st_mode) == 0o600
    assert words[words.index("MV2_SUPPORT_DL=1") - 1 :][:2] == ["-env", "MV2_SUPPORT_DL=1"]
    assert words[-len(SCRIPT) :] == SCRIPT


SECRETS = {"HF_TOKEN": "hf_abcdefghijkl", "DB": "https://me:pass@host/db", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize("kind", runners.RUNNERS.values())
def test_secrets_are_on_no_command_line(kind):
    environment = {}
    words = command(kind, exports=SECRETS, environment=environment)
    line = str(words)
    assert "hf_abc" not in line
    assert "pass@" not in line
    assert "INFO" in line
    if kind is not runners.PDSHRunner:  # which has no other way; the user is told
        assert environment["HF_TOKEN"] == "hf_abcdefghijkl"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (runners.SlurmRunner, "a,b"),
        (runners.OpenMPIRunner, "a;b"),
        (runners.SlurmRunner, "a\nb"),
        (runners.MPICHRunner, ""),
    ],
)
def test_values_that_a_program_would_take_apart_go_through_its_environment(kind, value):
    environment = {}
    assert f"K={value}" not in str(command(kind, exports={"K": value}, environment=environment))
    assert environment["K"] == value


@pytest.mark.parametrize(
    "kind", [runners.OpenMPIRunner, runners.MPICHRunner, runners.IMPIRunner, runners.MVAPICHRunner]
)
@pytest.mark.parametrize("word", ["--include=h1", "--exclude=h1", "--num_nodes=1", "--num_gpus=1"])
def test_programs_that_cannot_choose(kind, word):
    with pytest.raises(LaunchError, match=word.partition("=")[0]):
        made(kind, word)


def test_more_mistakes():
    with pytest.raises(LaunchError, match="not words"):
        command(runners.SlurmRunner, "--launcher_args='")
    for kind in (runners.IMPIRunner, runners.MVAPICHRunner):
        with pytest.raises(LaunchError, match="h1 2, h2 1"):
            command(kind, active={"h1": [0, 1], "h2": [0]})
    with pytest.raises(LaunchError, match="slots 1,2 of h1"):
        command(runners.SlurmRunner, "--include=h1:1,2@h2:1,2", active={"h1": [1, 2], "h2": [1, 2]})
