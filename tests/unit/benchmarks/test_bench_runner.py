"""Whose turn it is, what a child reports, and a fake contender from end to end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.case import Case, Job, Measure, Setting
from benchmarks.environments import ROOT
from benchmarks.processes import CHILD, Contender, MeasurementError, combine, last_line, measure, read_result, variables
from benchmarks.runner import fitting, run_case, turns

MEASURES = (Measure("seconds", "time", "s"), Measure("rate", "rate", "tokens/s", better="higher"))
CONTENDERS = [Contender(name, sys.executable) for name in ("ours", "deepspeed", "torch")]


def case_file(folder: Path, body: str) -> str:
    file = folder / "fake_case.py"
    file.write_text(f"def measure(job):\n    {body}\n")
    return str(file)


def fake(folder: Path, body: str, **options) -> Case:
    return Case("fake", "a fake case", case_file(folder, body), MEASURES, **options)


def test_contenders_alternate():
    names = [contender.name for _, contender in turns(CONTENDERS, 3)]
    assert names == ["ours", "deepspeed", "torch"] * 3
    assert [turn for turn, _ in turns(CONTENDERS, 2)] == [0, 0, 0, 1, 1, 1]


def test_a_flavour_uses_its_environments_interpreter():
    case = Case("c", "t", "f", (), contenders=("ours", "torch", "torch:fsdp2", "deepspeed"))
    chosen = fitting(case, [Contender("torch", "/t", {"A": "1"}), Contender("ours", "/o")])
    assert [contender.name for contender in chosen] == ["ours", "torch", "torch:fsdp2"]
    assert [contender.python for contender in chosen] == ["/o", "/t", "/t"]
    assert (chosen[2].environment, chosen[2].flavour, chosen[2].variables) == ("torch", "fsdp2", {"A": "1"})


def test_samples_arrive_in_rounds_and_a_failure_ends_a_contenders_turns():
    seen = []

    def measurer(case, setting, contender):
        seen.append((setting.ranks, contender.name))
        if contender.name == "deepspeed":
            raise MeasurementError("broken")
        return {"seconds": float(len(seen))}

    case = Case("c", "t", "f", MEASURES, ranks=(1, 2))
    run = run_case(case, CONTENDERS, rounds=2, measurer=measurer)
    once = ["ours", "deepspeed", "torch", "ours", "torch"]
    assert seen == [(1, name) for name in once] + [(2, name) for name in once]
    assert run.settings[0].samples == {"ours": {"seconds": [1.0, 4.0]}, "torch": {"seconds": [3.0, 5.0]}}
    assert run.settings[0].failures == {"deepspeed": "broken"}


def test_the_worst_rank_counts():
    case = Case("c", "t", "f", MEASURES)
    assert combine(case, [{"seconds": 1.0, "rate": 5.0}, {"seconds": 2.0, "rate": 4.0}]) == {
        "seconds": 2.0,
        "rate": 4.0,
    }
    assert combine(case, [{"seconds": 1.0}, {}]) == {"seconds": 1.0}
    with pytest.raises(MeasurementError, match="surprise"):
        combine(case, [{"surprise": 1.0}])


def test_the_marked_line_is_found_among_noise():
    assert read_result('noise\nbenchmark-result {"a": 1}\nmore noise\n') == {"a": 1}
    assert read_result("noise\n") is None
    assert last_line("Traceback\n  file\nValueError: bad\n\n") == "ValueError: bad"


def test_children_do_not_inherit_what_would_change_the_measurement(monkeypatch):
    for name in ("PYTHONPATH", "RANK", "OMPI_COMM_WORLD_RANK", "PYTHONDONTWRITEBYTECODE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    found = variables(Contender("ours", "/somewhere/bin/python", {"PYTHONPATH": "/root"}), {"RANK": "3"})
    assert (found["PYTHONPATH"], found["RANK"], found["KEPT"]) == ("/root", "3", "yes")
    assert not {"OMPI_COMM_WORLD_RANK", "PYTHONDONTWRITEBYTECODE", "MASTER_PORT"} & set(found)
    assert found["PATH"].split(os.pathsep)[0] == "/somewhere/bin"


def test_one_measurement_end_to_end(tmp_path):
    body = (
        "import os; job.line_up('start'); print('chatter'); "
        "assert int(os.environ['RANK']) == job.rank and int(os.environ['WORLD_SIZE']) == job.ranks; "
        "return {'seconds': job.rank + job.parameters['base'], 'rate': 10.0 - job.rank}"
    )
    numbers = measure(fake(tmp_path, body), Setting(2, {"base": 5}), CONTENDERS[0])
    assert numbers == {"seconds": 6.0, "rate": 9.0}


def test_a_childs_path_is_its_interpreters_own(tmp_path, monkeypatch):
    """Real DeepSpeed would import our package instead of its own; no module of ours may hide one of theirs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(ROOT)
    unwanted = ["", ".", str(tmp_path), str(CHILD.parent)]
    body = f"import sys, benchmarks.case; return {{'seconds': float(any(p in sys.path for p in {unwanted!r}))}}"
    assert measure(fake(tmp_path, body), Setting(), CONTENDERS[1]) == {"seconds": 0.0}


def test_a_failing_rank_is_named_with_its_error_and_ends_the_others(tmp_path):
    body = "import signal; signal.pause() if job.rank == 0 else (_ for _ in ()).throw(ValueError('it broke'))"
    with pytest.raises(MeasurementError, match="rank 1 ended with code 1: ValueError: it broke"):
        measure(fake(tmp_path, body), Setting(2), CONTENDERS[0])


def test_a_hang_ends_at_the_limit(tmp_path):
    with pytest.raises(MeasurementError, match=r"ranks \[0\] still ran after 0 s"):
        measure(fake(tmp_path, "import signal; signal.pause()", timeout_s=0.1), Setting(), CONTENDERS[0])


def test_a_missing_interpreter_is_a_measurement_error(tmp_path):
    with pytest.raises(MeasurementError, match="cannot start no-python"):
        measure(fake(tmp_path, "return {}"), Setting(), Contender("ours", str(tmp_path / "no-python")))


def test_line_up_says_who_is_missing(tmp_path):
    job = Job("ours", "", 0, 3, {}, str(tmp_path))
    (tmp_path / "start.2").touch()
    with pytest.raises(TimeoutError, match=r"for ranks \[1\]"):
        job.line_up("start", timeout_s=0.01)
