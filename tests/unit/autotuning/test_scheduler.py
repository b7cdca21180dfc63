"""Runs of an experiment: a small program stands for the launcher, and ends in every way that a job can."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from deepspeed.autotuning.scheduler import BudgetSpent, Ending, Experiment, ResourceManager, TunedJob
from deepspeed.config.autotuning import DeepSpeedAutotuningConfig
from tests.harness import ranks

PROGRAM = """
import json, os, sys, time
config = json.load(open(sys.argv[-1]))
goal = config["autotuning"]["metric_path"]
kind = config["kind"]
open("runs", "a").write(kind + "\\n")
def steps(number):
    open(goal.replace(".json", ".steps"), "w").write(str(number))
if kind in ("measures", "lingers"):
    steps(6)
    json.dump({"latency": 1.0}, open(goal, "w"))
elif kind in ("short", "hangs"):
    steps(2)
elif kind == "memory":
    sys.exit("torch.OutOfMemoryError: tried to allocate")
elif kind == "fails":
    sys.exit("what went wrong")
elif kind == "silent":
    sys.exit(3)
if kind in ("hangs", "lingers", "stuck"):
    if os.fork() == 0:
        os.setsid()
    open("pids", "a").write(str(os.getpid()) + "\\n")
    time.sleep(1000)
"""


def runs(folder, monkeypatch, deadline=None, **keys):
    """A manager whose launcher is the program."""
    os.chdir(folder)
    Path("launcher.py").write_text(PROGRAM)
    Path("train.py").write_text("")
    monkeypatch.setattr(
        TunedJob, "program", lambda self, command: [sys.executable, "-S", "launcher.py", *map(str, command)]
    )
    job = TunedJob((), "train.py", ("--deepspeed_config", "ds.json"), 1, 2, True)
    return ResourceManager(job, DeepSpeedAutotuningConfig(**keys), deadline)


def gone():
    """Whether all processes that the program wrote down have ended."""
    pids = [int(line) for line in Path("pids").read_text().split()]
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    return pids, not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("kind", "ending", "said"),
    [
        ("ignores", Ending.SHORT, "train.py built no engine with the config of this run"),
        ("short", Ending.SHORT, "it ended after 2 optimizer steps, and the window ends with step 6"),
        ("memory", Ending.MEMORY, "a rank ran out of memory"),
        ("fails", Ending.FAILED, "exited with code 1; what went wrong"),
        ("silent", Ending.FAILED, "exited with code 3; it printed nothing"),
        ("hangs", Ending.HUNG, "2 steps were over, and 6 are needed"),
        ("stuck", Ending.HUNG, "built no engine"),
    ],
)
@ranks(1, init=False)
def test_endings(kind, ending, said, tmp_path, monkeypatch):
    found = runs(tmp_path, monkeypatch, patience=2.0).run(Experiment("one", {"kind": kind}, 1))
    assert found.ending is ending
    assert said in found.reason
    if ending is Ending.HUNG:
        pids, ended = gone()
        assert ended
        assert len(pids) == 2


@ranks(1, init=False)
def test_results_are_kept_and_belong_to_their_settings(tmp_path, monkeypatch):
    manager = runs(tmp_path, monkeypatch)
    experiment = Experiment("one", {"kind": "measures"}, 1)
    assert manager.run(experiment).metrics == {"latency": 1.0}
    folder = Path("autotuning_results/one")
    names = {"ds_config.json", "exp.json", "cmd.txt", "stdout.log", "stderr.log", "metrics.json", "result.json"}
    assert names <= set(os.listdir(folder))
    assert json.loads(Path("autotuning_exps/one.json").read_text())["num_gpus"] == 2
    assert folder.joinpath("cmd.txt").read_text().startswith("deepspeed train.py --deepspeed_config /")
    assert manager.run(experiment) == runs(tmp_path, monkeypatch).run(experiment)
    assert Path("runs").read_text() == "measures\n"
    folder.joinpath("result.json").write_text('{"ending": "meas')  # as a kill leaves it
    assert manager.run(experiment).ending is Ending.MEASURED
    Path("train.py").write_text("x = 1")
    job = TunedJob((), "train.py", ("--deepspeed_config", "ds.json"), 1, 2, True)
    assert ResourceManager(job, DeepSpeedAutotuningConfig()).run(experiment).ending is Ending.MEASURED
    assert Path("runs").read_text() == "measures\n" * 3


@ranks(1, init=False)
def test_the_budget_ends_a_run_without_a_result(tmp_path, monkeypatch):
    manager = runs(tmp_path, monkeypatch, deadline=time.monotonic() + 1.0)
    with pytest.raises(BudgetSpent):
        manager.run(Experiment("one", {"kind": "hangs"}, 1))
    assert gone()[1]
    assert not Path("autotuning_results/one/result.json").exists()
