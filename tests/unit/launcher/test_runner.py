"""The `deepspeed` command up to the start: options, device selection, mistakes."""

from __future__ import annotations

import logging
import os

import pytest

from deepspeed.launcher import launch, runner
from deepspeed.launcher.hosts import decode_world_info


class Devices:
    """An accelerator with so many devices, as the runner sees one."""

    def __init__(self, count, name="cuda", variables=("CUDA_VISIBLE_DEVICES",)):
        self.count, self.name, self.variables = count, name, list(variables)

    def device_count(self):
        return self.count

    def device_name(self):
        return self.name

    def visible_devices_envs(self):
        return self.variables


@pytest.fixture
def start(monkeypatch, caplog):
    """A function that runs the command with devices, and gives what the per-node launcher would be asked."""
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = []
    monkeypatch.setattr(launch, "run", lambda args: asked.append(args) or 0)

    def run(*words, devices=Devices(4), status=0):
        monkeypatch.setattr(runner, "get_accelerator", lambda: devices)
        if status:
            with pytest.raises(SystemExit) as ended:
                runner.main([*words, "train.py", "--lr", "1"])
            assert ended.value.code == status
            assert not asked
            return None
        runner.main([*words, "train.py", "--lr", "1"])
        (args,) = asked
        asked.clear()
        assert args.training_script == "train.py"
        assert args.training_script_args == ["--lr", "1"]
        return args

    return run


def slots(args):
    return decode_world_info(args.world_info)


DEFAULTS = {
    "hostfile": "/job/hostfile",
    "include": "",
    "exclude": "",
    "num_nodes": -1,
    "num_gpus": -1,
    "master_port": 29500,
    "master_addr": "",
    "node_rank": -1,
    "launcher": "pdsh",
    "launcher_args": "",
    "module": False,
    "no_python": False,
    "no_local_rank": False,
    "no_ssh": False,
    "no_ssh_check": False,
    "force_multi": False,
    "save_pid": False,
    "enable_each_rank_log": "None",
    "autotuning": "",
    "budget": None,
    "preflight": False,
    "preflight_args": "",
    "bind_cores_to_rank": False,
    "bind_core_list": None,
    "output": "",
    "ssh_port": None,
    "venv_script": None,
    "log_level": "info",
    "quiet": False,
    "elastic_training": False,
    "min_elastic_nodes": -1,
    "max_elastic_nodes": -1,
    "max_elastic_restarts": 100,
    "user_script": "s.py",
    "user_args": [],
    "hostfile_chosen": False,
    "master_port_chosen": False,
    "launcher_chosen": False,
    "launcher_words": [],
}


def test_every_option_and_its_default():
    assert vars(runner.parse_args(["s.py"])) == DEFAULTS


def test_the_help_shows_defaults_that_mean_something(capsys):
    with pytest.raises(SystemExit):
        runner.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for default in ("/job/hostfile", "29500", "pdsh", "info", "100"):
        assert f"(default: {default})" in shown
    assert shown.count("(default:") == 5


def test_options_after_the_script_belong_to_it():
    args = runner.parse_args(["-H", "f", "--num_accelerators", "2", "s.py", "--num_gpus", "3", "--", "-q"])
    assert (args.hostfile, args.num_gpus, args.user_args) == ("f", 2, ["--num_gpus", "3", "--", "-q"])
    assert runner.parse_args(["--launcher", "SLURM", "s.py"]).launcher == "slurm"


@pytest.mark.parametrize("words", [[], ["--launcher", "carrier_pigeon", "s.py"], ["--no_such", "2", "s.py"]])
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit) as ended:
        runner.parse_args(words)
    assert ended.value.code == 2


def test_the_name_of_the_environment_file():
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"


# ---- devices of this machine


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], [0, 1, 2, 3]),
        (["--num_gpus", "2"], [0, 1]),
        (["--include", "localhost:1,3"], [1, 3]),
        (["--exclude", "localhost:0"], [1, 2, 3]),
        (["--num_nodes", "1"], [0, 1, 2, 3]),
    ],
)
def test_local_devices(start, words, wanted):
    args = start(*words)
    assert slots(args) == {"localhost": wanted}
    assert (args.master_addr, args.node_rank) == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("2", [2]), ("3,1", [3, 1]), (" 0 , 1 ", [0, 1]), ("1,-1,2", [1]), ("GPU-ab,MIG-cd", ["GPU-ab", "MIG-cd"])],
)
def test_visible_devices_are_used_in_their_order(start, monkeypatch, value, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert slots(start()) == {"localhost": wanted}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_options_win_over_visible_devices(start, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert slots(start("--num_gpus", "2")) == {"localhost": [0, 1]}
    assert "CUDA_VISIBLE_DEVICES=2,3 is ignored" in caplog.text
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_the_last_of_several_variables_wins(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    both = Devices(2, variables=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    assert slots(start(devices=both)) == {"localhost": [1]}


def test_the_cpu_takes_any_number_of_ranks(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    cpu = Devices(1, "cpu", ())
    assert slots(start("--num_gpus", "5", devices=cpu)) == {"localhost": [0, 1, 2, 3, 4]}
    assert slots(start(devices=cpu)) == {"localhost": [0]}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    ("words", "count", "visible", "message"),
    [
        ([], 0, None, "no device of the accelerator 'cuda'"),
        ([], 4, "9", "No slot '9' specified on host 'localhost'"),
        ([], 4, "", "hides all 4 devices"),
        (["--num_gpus", "8"], 4, None, "this machine has 4 cuda devices"),
        (["--num_gpus", "0"], 4, None, "--num_gpus 0"),
        (["--num_nodes", "2"], 4, None, "there is no hostfile"),
        (["--include", "localhost:4"], 4, None, "No slot '4' specified"),
        (["--include", "h"], 4, None, "Hostname 'h' not found"),
        (["--include", "localhost:0", "--num_gpus", "1"], 4, None, "--num_gpus and --include"),
        (["--include", "localhost:0", "--exclude", "localhost:1"], 4, None, "mutually exclusive"),
        (["--exclude", "localhost"], 4, None, "no slot is left"),
        (["--no_ssh"], 4, None, "--no_ssh needs --node_rank, from 0 to 0"),
        (["--autotuning", "tune", "--elastic_training"], 4, None, "leave out --preflight, --elastic_training"),
        (["--budget", "3"], 4, None, "--budget limits --autotuning"),
        (["--autotuning", "tune"], 4, None, "names a config. Expected --deepspeed_config FILE.json"),
        (["--min_elastic_nodes", "2"], 4, None, "belong to --elastic_training; give that, too"),
        (["--elastic_training", "--min_elastic_nodes", "2"], 4, None, "the job has only 1 host"),
        (["--elastic_training", "--min_elastic_nodes", "0"], 4, None, "no range of hosts"),
        (["--elastic_training", "--min_elastic_nodes", "3", "--max_elastic_nodes", "2"], 4, None, "no range of hosts"),
        (["--elastic_training", "--max_elastic_restarts", "-1"], 4, None, "--max_elastic_restarts -1"),
    ],
)
def test_mistakes(start, monkeypatch, capsys, words, count, visible, message):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    start(*words, devices=Devices(count), status=2)
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("deepspeed: error: ")
    assert message in told


def test_an_elastic_job_is_told_so_to_its_node(start):
    args = start("--elastic_training", "--max_elastic_restarts", "7")
    assert (args.enable_elastic_training, args.max_elastic_restarts, args.elastic_store_kept) == (True, 7, False)
    assert not start().enable_elastic_training


# ---- hostfiles


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"

    def write(text):
        path.write_text(text)
        return f"--hostfile={path}"

    return write


def test_one_host_of_a_hostfile_is_this_machine(start, hostfile):
    assert slots(start(hostfile("somewhere slots=3"))) == {"somewhere": [0, 1, 2]}
    two = hostfile("a slots=2\nb slots=3")
    assert slots(start(two, "--include", "b:1")) == {"b": [1]}
    assert slots(start(two, "--num_nodes", "1")) == {"a": [0, 1]}
    assert start(two, "--num_nodes", "1").master_addr == "127.0.0.1"


def test_several_hosts_without_ssh(start, hostfile):
    two = hostfile("a slots=2\nb slots=3")
    args = start(two, "--no_ssh", "--node_rank", "1")
    assert slots(args) == {"a": [0, 1], "b": [0, 1, 2]}
    assert (args.node_rank, args.master_addr, args.master_port) == (1, "a", 29500)
    assert start(two, "--no_ssh", "--node_rank=0", "--master_addr", "10.0.0.1").master_addr == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("a slots=2\n-oProxyCommand=x slots=3", [], "is not the name or address of a host"),
        ("a slots=2\nb slots=3", ["--no_ssh", "--node_rank", "2"], "from 0 to 1 (a, b); it is 2"),
        ("a slots=2\nb slots=3", ["--num_nodes", "3"], "more than the 2 hosts"),
        ("a slots=2\na slots=3", [], "listed twice"),
        ("a", [], "does not name a host"),
        ("a slots=0", [], "no slot is left"),
        ("a slots=5", [], "this machine has 4 cuda devices"),
    ],
)
def test_mistakes_with_hostfiles(start, hostfile, capsys, text, words, message):
    start(hostfile(text), *words, status=2)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("path", ["/no/such/file", "/job/hostfile"])
def test_a_hostfile_that_is_not_there(start, capsys, path):
    """The default one need not exist, and is no other where it is asked for."""
    start("--hostfile", path, status=2)
    assert f"--hostfile {path}: there is no such file" in capsys.readouterr().err
    assert slots(start()) == {"localhost": [0, 1, 2, 3]}
    assert "hostfile" not in capsys.readouterr().err


# ---- the rest


def test_options_are_passed_on(start):
    args = start(
        *("--module", "--no_local_rank", "--save_pid", "--enable_each_rank_log", "logs", "-q"),
        *("--bind_cores_to_rank", "--bind_core_list", "0-1", "--master_port", "12345"),
    )
    assert (args.module, args.no_python, args.no_local_rank, args.quiet) == (True, False, True, True)
    assert args.save_pid == os.getpid()
    assert (args.enable_each_rank_log, args.bind_cores_to_rank, args.bind_core_list) == ("logs", True, "0-1")
    assert args.master_port == 12345


def test_one_host_leaves_the_port_to_whoever_starts_the_ranks(start, hostfile):
    assert start().master_port == 0
    assert start("--master_port", "29500").master_port == 29500
    two = hostfile("a slots=1\nb slots=1")
    assert start(two, "--no_ssh", "--node_rank", "0").master_port == 29500  # which the other host knows too


def test_the_number_of_the_only_host(start, caplog):
    """DeepSpeed takes --node_rank with a single host; 0 is what it is anyway."""
    args = start("--num_gpus", "2", "--node_rank", "0")
    assert (slots(args), args.node_rank) == ({"localhost": [0, 1]}, 0)
    assert caplog.text == ""
    assert start("--node_rank", "3").node_rank == 0
    assert "--node_rank 3 is not used without --no_ssh" in caplog.text


def test_options_without_effect_are_told(start, caplog):
    start("--ssh_port", "22", "--launcher_args", "x", "--no_ssh_check", "--venv_script", "a")
    for name in ("ssh_port", "launcher_args", "no_ssh_check", "venv_script"):
        assert f"--{name} has no effect" in caplog.text
