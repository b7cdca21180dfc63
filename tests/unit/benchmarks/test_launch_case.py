"""The case about launchers: what it measures, and that a launcher which fails is not a measurement."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.case import Job
from benchmarks.cases import launch_overhead


def job(folder, contender):
    return Job(contender, "", 0, 1, {"processes": 3}, str(folder))


@pytest.mark.parametrize(
    ("contender", "option"), [("ours", "--num_gpus"), ("deepspeed", "--num_gpus"), ("torch", "--nproc-per-node")]
)
def test_the_last_rank_counts(tmp_path, monkeypatch, contender, option):
    monkeypatch.setenv("RANK", "7")
    asked = []

    def run(command, env, **_):
        asked.append(command)
        assert "RANK" not in env
        for rank in range(3):
            (Path(env["LAUNCH_FOLDER"]) / f"first.{rank}").write_text(repr(start + 1.0 + rank))
        return subprocess.CompletedProcess(command, 0, "")

    clock = iter((100.0, 105.0))
    start = 100.0
    monkeypatch.setattr(launch_overhead.subprocess, "run", run)
    monkeypatch.setattr(launch_overhead.time, "monotonic", lambda: next(clock))
    assert launch_overhead.measure(job(tmp_path, contender)) == {"first_s": 3.0, "end_s": 5.0}
    assert asked[0][3:5] == [option, "3"]


def test_a_launch_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = launch_overhead.measure(job(tmp_path, "ours"))
    assert 0 < found["first_s"] < found["end_s"]


def test_a_launcher_that_fails(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 3, "no such option")
    monkeypatch.setattr(launch_overhead.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="ours ended with 3: no such option"):
        launch_overhead.measure(job(tmp_path, "ours"))
