"""The preflight as a job: ranks with folders of their own, so that each may differ from the others in one thing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

import pytest

from deepspeed.launcher import runner
from deepspeed.preflight import __main__ as program
from deepspeed.preflight import run as preflight_run
from deepspeed.preflight.checks import CHECKS, folder, speed
from deepspeed.preflight.checks.machine import available_memory
from tests.distributed.launcher.launched import Launched
from tests.harness import ranks
from tests.warm_python import Warm

PATIENCE = 250.0  # seconds, only ever reached by a test that fails
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
SPEEDS = "compute,bandwidth"  # which say something about the machine that runs the tests


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Job:
    """Ranks of one preflight, each in a folder of its own with a script and a config."""

    def __init__(self, folder, world):
        self.folder, self.world, self.port = folder, world, free_port()
        for rank in range(world):
            own = self.of(rank)
            own.mkdir()
            (own / "train.py").write_text("print('training')\n")
            (own / "ds.json").write_text(json.dumps(CONFIG))

    def of(self, rank):
        return self.folder / f"rank{rank}"

    def run(self, *words, only=None, before=lambda rank: None, stuck=()):
        """The exit codes of the ranks, and what rank 0 printed; `before` runs in the process of each rank."""
        words = [*words, "--write-size", "64K", "--size", "64K", "train.py", "--deepspeed_config", "ds.json"]

        def begin(rank):
            def act(arguments):
                before(rank)
                sys.exit(program.main(arguments))

            return act

        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(Launched(words, self.of(rank), main=begin(rank), environ=self.place(rank)))
                for rank in (range(self.world) if only is None else only)
            ]
            codes = [each.wait(PATIENCE) for rank, each in enumerate(started) if rank not in stuck]
        return codes, started[0].output(), started[0].errors()

    def place(self, rank):
        facts = {"RANK": rank, "WORLD_SIZE": self.world, "LOCAL_RANK": rank, "LOCAL_SIZE": self.world}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "GLOO_SOCKET_IFNAME": "lo"}
        return {name: str(value) for name, value in {**facts, **master}.items()}


def levels(output):
    return {name: {each["level"] for each in own} for name, own in json.loads(output)["checks"].items()}


@ranks(1, init=False)
def test_nothing_is_wrong(tmp_path):
    codes, output, errors = Job(tmp_path, 3).run("--json", "--skip", SPEEDS)
    told = json.loads(output)
    assert codes == [0, 0, 0], errors
    assert told["ready"] is True
    assert told["ranks"] == 3
    assert set(told["checks"]) == {"ranks", *(check.name for check in CHECKS)} - set(SPEEDS.split(","))
    assert levels(output)["ranks"] == levels(output)["config"] == levels(output)["code"] == {"ok"}
    assert sorted(os.listdir(tmp_path / "rank0")) == ["ds.json", "err", "out", "train.py"]


SHOWS = """
import torch
def build_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, WIDTH))
def example_batch(batch, sequence=None):
    return torch.zeros(batch, 64)
"""


@ranks(1, init=False)
def test_the_job_is_planned(tmp_path):
    """This machine has addresses for the layer, and no memory for its states."""
    job = Job(tmp_path, 2)
    for rank in range(2):
        script = SHOWS.replace("WIDTH", str(available_memory() // 6 // (4 * 64)))
        (job.of(rank) / "train.py").write_text(script)
    codes, output, errors = job.run("--json", "--model", "train.py", "--skip", f"{SPEEDS},clock,shared_folder,ops")
    (found,) = json.loads(output)["checks"]["plan"]
    assert codes == [1, 1], (errors, found)
    assert found["level"] == "problem"
    assert "its ranks need" in found["what"]
    assert "offload_optimizer" in found["advice"]


@ranks(1, init=False)
def test_each_rank_that_differs_is_named_with_what_differs(tmp_path):
    job = Job(tmp_path, 4)
    (job.of(1) / "ds.json").write_text(json.dumps({**CONFIG, "gradient_clipping": 1.0}))
    (job.of(2) / "train.py").write_text("print('something else')\n")
    (job.of(3) / "ds.json").unlink()
    codes, output, errors = job.run("--json", "--skip", SPEEDS)
    assert codes == [1, 1, 1, 1]
    checks = json.loads(output)["checks"]
    assert {tuple(each["ranks"]) for each in checks["config"] if each["level"] == "problem"} == {(1,), (3,)}
    assert [(each["level"], each["ranks"]) for each in checks["code"]] == [("problem", [2])]
    assert "has another train.py" in checks["code"][0]["what"]
    assert "NOT READY: 3 problems" in errors


@ranks(1, init=False)
def test_a_checkpoint_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    codes, output, _ = Job(tmp_path, 2).run("--skip", SPEEDS, "--checkpoint", str(tmp_path / "file" / "inner"))
    assert codes == [1, 1]
    assert "cannot write to" in output
    assert "give --checkpoint a folder that can be written" in output
    assert output.splitlines()[-1].startswith("NOT READY: 1 problem")


@ranks(1, init=False)
def test_a_full_disk(tmp_path):
    codes, output, _ = Job(tmp_path, 1).run("--json", "--params", "900T")
    found = json.loads(output)["checks"]["checkpoint_folder"]
    (finding,) = [each for each in found if each["level"] == "problem"]
    assert codes == [1]
    assert "a checkpoint takes about 14" in finding["what"]


@ranks(1, init=False)
def test_a_rank_that_never_comes_is_named(tmp_path):
    codes, output, _ = Job(tmp_path, 4).run("--json", "--timeout", "8", "--skip", SPEEDS, only=[0, 1, 3])
    (finding,) = json.loads(output)["checks"]["ranks"]
    assert codes == [1, 1, 1]
    assert finding["ranks"] == [2]
    assert finding["what"].startswith("rank 2 has not come within 8 s; going by the ranks beside, on ")


@ranks(1, init=False)
def test_rank_0_that_never_comes_is_told_by_the_others(tmp_path):
    codes, output, errors = Job(tmp_path, 2).run("--timeout", "1", only=[1])
    assert codes == [2]
    assert output == ""
    assert "rank 1 found nobody at 127.0.0.1:" in errors
    assert "rank 0 was not started" in errors


def hang(rank):
    """Rank 1 comes, and then its disk does not answer."""
    if rank == 1:
        folder.FolderCheck.gather = lambda *_: signal.pause()


@ranks(1, init=False)
def test_a_rank_that_comes_and_hangs_is_named(tmp_path):
    codes, output, _ = Job(tmp_path, 3).run("--json", "--timeout", "8", "--skip", SPEEDS, before=hang, stuck=[1])
    found = json.loads(output)["checks"]["ranks"]
    assert codes == [1, 1]
    assert [each["level"] for each in found] == ["ok", "problem"]
    assert found[1]["ranks"] == [1]
    assert "came, and said nothing more within 8 s" in found[1]["what"]


def slow_down(rank):
    """Everything that is measured is done once, and takes rank 2 twenty times as long as the others."""

    def seconds(call, device, **counts):
        call()
        return 2.0 if rank == 2 else 0.1

    speed._TRIALS, speed._PRODUCTS, speed.seconds = 1, 1, seconds


@ranks(1, init=False)
def test_a_slow_rank_is_named(tmp_path):
    codes, output, _ = Job(tmp_path, 4).run("--json", before=slow_down)
    checks = json.loads(output)["checks"]
    assert codes == [1] * 4
    for name in ("compute", "bandwidth"):
        assert 2 in [rank for each in checks[name] if each["level"] != "ok" for rank in each["ranks"]], checks[name]


def skewed(rank):
    """Every rank is a host of its own, and the clock of the last one is an hour ahead."""
    preflight_run.socket = type("Hosts", (), {"gethostname": staticmethod(lambda: f"host{rank}")})
    os.environ["LOCAL_RANK"] = "0"
    if rank == 2:
        usual = preflight_run.run.__defaults__[0]
        preflight_run.run.__defaults__ = (lambda: usual() + 3600 * 10**9,)


@ranks(1, init=False)
def test_a_clock_that_is_an_hour_ahead(tmp_path):
    codes, output, _ = Job(tmp_path, 3).run("--json", "--skip", SPEEDS, before=skewed)
    told = json.loads(output)
    (finding,) = told["checks"]["clock"]
    (shared,) = told["checks"]["shared_folder"]  # every rank has its own here
    assert (shared["level"], shared["ranks"]) == ("warning", [1, 2])
    assert codes == [1, 1, 1]
    assert told["hosts"] == ["host0", "host1", "host2"]
    assert (finding["level"], finding["ranks"]) == ("problem", [2])
    assert finding["what"] == "the clock of rank 2 on host host2 is 3.6e+03 s ahead of that of rank 0"


def broken(rank):
    """The clock of rank 1 cannot be read, in the middle of an exchange with rank 0."""
    skewed(rank)
    if rank == 1:

        def fail():
            raise OSError("the clock is broken")

        preflight_run.run.__defaults__ = (fail,)


@ranks(1, init=False)
def test_a_check_that_fails_on_one_rank_ends_on_all(tmp_path):
    codes, output, _ = Job(tmp_path, 2).run("--json", "--timeout", "5", before=broken)
    checks = json.loads(output)["checks"]
    assert codes == [1, 1]
    assert any("the clock is broken" in each["what"] and each["ranks"] == [1] for each in checks["clock"])
    assert {each["level"] for each in checks["bandwidth"]} == {"problem"}


@pytest.mark.parametrize("style", ["plain", "rank"])
@ranks(1, init=False)
def test_the_launcher_starts_it_in_the_place_of_the_script(tmp_path, style):
    job = Job(tmp_path, 1)
    words = [
        "--num_gpus",
        "2",
        "--output",
        style,
        "--preflight",
        "--preflight_args",
        f"--skip {SPEEDS} --write-size 64K",
    ]
    words += ["train.py", "--deepspeed_config=ds.json"]
    with Warm() as python, Launched(words, job.of(0), main=runner.main, python=python) as launched:
        assert launched.wait(PATIENCE) == 0, launched.errors()
    output = launched.output()
    assert "training" not in output
    assert "ds.json is valid on 2 ranks" in output
    assert "READY" in output.splitlines()[-1]


@ranks(1, init=False)
def test_the_launcher_ends_with_the_verdict(tmp_path):
    job = Job(tmp_path, 1)
    words = ["--num_gpus", "2", "--preflight", "nothing.py"]
    with Warm() as python, Launched(words, job.of(0), main=runner.main, python=python) as launched:
        assert launched.wait(PATIENCE) == 1
    assert "there is no script nothing.py for ranks 0-1" in launched.output()
    assert "rank 0 failed first" in launched.errors()
    assert "    | preflight: NOT READY: 1 problem" in launched.errors()
