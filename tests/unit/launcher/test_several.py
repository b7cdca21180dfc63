"""What the `deepspeed` command hands to the relay for a job on several hosts."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import subprocess
import sys

import pytest

from deepspeed.launcher import multi_host, runner
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.launch import parse_args as launch_args
from deepspeed.launcher.protocol import Link


@pytest.fixture
def start(monkeypatch, tmp_path, caplog):
    """A function that runs the command with a hostfile, and gives the relay's plan and environment."""
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    installed = {"pdsh", "ssh", "sinfo", "srun", "ompi_info", "mpirun"}
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}" if name in installed else None)
    monkeypatch.setattr(multi_host, "address_of", lambda host, port, given=(): f"address-of-{host}")
    asked = []
    monkeypatch.setattr(multi_host, "supervise", lambda plan, env: asked.append((plan, env)) or 0)
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=1\n")

    def run(*words, status=0, script=("train.py", "--lr", "a b")):
        if status:
            with pytest.raises(SystemExit) as ended:
                runner.main(["-H", "hosts", *words, *script])
            assert ended.value.code == status
            return None
        runner.main(["-H", "hosts", *words, *script])
        ((plan, environment),) = asked
        asked.clear()
        assert plan.program == "relay"
        assert pickle.loads(pickle.dumps(plan)) == plan
        return plan, environment

    run.installed = installed
    return run


def job(link):
    return json.loads(link.opening[8:])


def test_ssh_where_pdsh_is_absent(start):
    start.installed.remove("pdsh")
    plan, _ = start("--ssh_port", "22")
    assert [link.host for link in plan.links] == ["h1", "h2"]
    for node, link in enumerate(plan.links):
        assert link.command[:4] == ["ssh", "-T", "-x", "-o"]
        assert link.command[-5:-1] == ["-p", "22", "--", f"h{node + 1}"]
        assert link.command[-1].endswith("-u -m deepspeed.launcher.launch --job_from_stdin")
        args = launch_args(job(link)["arguments"])
        assert (args.node_rank, args.master_addr, args.master_port) == (node, "address-of-h1", 29500)
        assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "a b"])
    assert (plan.style, plan.world, plan.hosts) == ("rank", 3, ())
    assert job(plan.links[0])["environment"]["DEEPSPEED_RELAY"] == f"{plan.token}:rank"


def test_pdsh_where_it_is_there(start):
    plan, environment = start("--output", "plain")
    (link,) = plan.links
    assert link.command[0] == "/bin/pdsh"
    assert (link.host, link.opening, link.forwards, plan.hosts) == ("", b"", False, ("h1", "h2"))
    assert environment["PDSH_RCMD_TYPE"] == "ssh"
    assert f"DEEPSPEED_RELAY={plan.token}:plain" in " ".join(link.command)


def test_a_launcher_that_is_not_installed(start, capsys):
    start.installed.remove("pdsh")
    start("--launcher", "pdsh", status=2)
    assert "launcher 'pdsh' not installed" in capsys.readouterr().err
    start("--launcher", "mvapich", status=2)


def test_secrets_go_where_nobody_sees_them(start, tmp_path, caplog):
    (tmp_path / ".deepspeed_env").write_text("HF_TOKEN=hf_abcdefghijkl\nPLAIN=a b\n")
    plan, environment = start("--launcher", "ssh")
    assert "hf_abc" not in str([link.command for link in plan.links])
    assert job(plan.links[1])["environment"]["HF_TOKEN"] == "hf_abcdefghijkl"
    for name in ("slurm", "openmpi"):
        plan, environment = start("--launcher", name)
        assert environment["HF_TOKEN"] == "hf_abcdefghijkl"
        assert "hf_abc" not in str(plan.links[0].command)
    assert "PLAIN=a b" in plan.links[0].command
    assert "not passed on" not in caplog.text
    plan, _ = start("--launcher", "pdsh")
    assert "hf_abc" not in str(plan.links[0].command)
    assert "not passed on" in caplog.text
    assert "HF_TOKEN" in caplog.text
    assert "hf_abc" not in caplog.text


def test_ranks_of_mpi_and_slurm_are_guarded(start):
    plan, _ = start("--launcher", "slurm", "--module", script=("pack.train", "--x"))
    words = plan.links[0].command
    helper = next(word for word in words if word.endswith("launcher_helper.py"))
    tail = words[words.index(helper) - 2 :]
    assert tail[:2] == [sys.executable, "-u"]
    assert tail[3:5] == ["--launcher", "slurm"]
    assert tail[-3:] == ["--module", "pack.train", "--x"]
    assert not any("MASTER_ADDR" in word for word in words)  # its tasks find the first node themselves
    assert any("MASTER_PORT=29500" in word for word in words)
    plan, _ = start("--launcher", "openmpi")
    assert "MASTER_ADDR=address-of-h1" in plan.links[0].command


def test_the_address_of_the_first_host(start, monkeypatch):
    def asked(*_):
        raise AssertionError("nobody was to be asked")

    monkeypatch.setattr(multi_host, "address_of", asked)
    plan, _ = start("--launcher", "ssh", "--master_addr", "10.0.0.9")
    assert launch_args(job(plan.links[0])["arguments"]).master_addr == "10.0.0.9"
    plan, _ = start("--launcher", "ssh", "--no_ssh_check")
    assert launch_args(job(plan.links[0])["arguments"]).master_addr == "h1"


def test_one_host_with_a_launcher(start):
    plan, _ = start("--launcher", "ssh", "--force_multi", "--include", "h2")
    assert [link.host for link in plan.links] == ["h2"]


def test_options_that_a_launcher_does_not_know(start, caplog):
    start("--launcher", "slurm", "--bind_cores_to_rank", "--venv_script", "x")
    assert "--bind_cores_to_rank has no effect with --launcher slurm" in caplog.text
    assert "--venv_script has no effect with --launcher slurm" in caplog.text


def test_labels_on_this_machine(start):
    plan, _ = start("--include", "h1", "--output", "fold")
    (link,) = plan.links
    assert link.command == [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--job_from_stdin"]
    assert (plan.world, plan.style) == (2, "fold")


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=id", "a b", "h1;id", "$(id)", "h[1-3]", "^file", "/re/", "h1,h2", "", "é"]
)
def test_names_that_are_no_hosts(host):
    with pytest.raises(LaunchError, match="is not the name or address of a host"):
        multi_host.check_hosts(["fine", host])


@pytest.mark.parametrize("host", ["h1", "user@h1.example.com", "10.0.0.1", "fe80::1%eth0", "a_b-c", "node01"])
def test_names_of_hosts(host):
    multi_host.check_hosts([host])


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (FileNotFoundError("ssh"), "there is no ssh"),
        (subprocess.TimeoutExpired("ssh", 30), "did not answer"),
        (subprocess.CompletedProcess([], 255, "", "x\nPermission denied\n"), r"exit code 255\): Permission denied"),
        (subprocess.CompletedProcess([], 0, "\n", ""), "told no address"),
    ],
)
def test_a_first_host_that_does_not_answer(monkeypatch, outcome, message):
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(LaunchError, match=message):
        multi_host.address_of("h1", None)


def test_the_address_is_the_first_one(monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "10.0.0.1 fd00::1 \n", "")
    )
    assert multi_host.address_of("h1", 22, ["-v"]) == "10.0.0.1"


def test_names_of_links():
    assert Link(host="h1", command=["ssh"]).name == "host h1"
    assert Link(host="", command=["/usr/bin/srun"]).name == "srun"


PREFLIGHT = ["deepspeed.preflight", "--params", "7B", "--no_python", "train.sh", "--lr", "a b"]


@pytest.mark.parametrize("name", ["ssh", "pdsh", "openmpi", "slurm"])
def test_a_preflight_takes_the_place_of_the_script(start, name):
    options = ("--launcher", name, "--preflight", "--preflight_args", "--params 7B", "--no_python")
    plan, _ = start(*options, script=("train.sh", "--lr", "a b"))
    if name == "ssh":
        args = launch_args(job(plan.links[0])["arguments"])
        assert (args.module, args.no_python) == (True, False)
        assert [args.training_script, *args.training_script_args] == PREFLIGHT
        return
    words = plan.links[0].command
    line = " ".join(words)
    assert "--module" in line
    assert line.endswith("--params 7B --no_python train.sh --lr 'a b'" if name == "pdsh" else " ".join(PREFLIGHT))


def test_options_of_a_preflight_need_one(start, capsys):
    start("--preflight_args=--json", status=2)
    assert "--preflight_args are options of --preflight, which is not given" in capsys.readouterr().err
    start("--preflight", "--module", "--no_python", status=2)
    assert "--module and --no_python contradict each other" in capsys.readouterr().err
    start("--preflight", "--preflight_args", "'open", status=2)
    assert "--preflight_args" in capsys.readouterr().err
