"""The table that people read, the JSON that programs read, and the command line."""

from __future__ import annotations

import io
import json
import socket
import sys

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import machine
from benchmarks.case import Case, Measure, Target
from benchmarks.cases import discover
from benchmarks.processes import Contender, MeasurementError
from benchmarks.report import Report, show, table, write
from benchmarks.runner import run_case
from benchmarks.summary import summarise

VERSIONS = {
    "ours": {"torch": "2.13.0", "deepspeed": "0.20.0", "device": "cpu"},
    "deepspeed": {"torch": "2.13.0", "deepspeed": "0.19.8", "device": "cpu"},
    "torch": {"torch": "2.13.0", "device": "cpu"},
}
NUMBERS = {"ours": {"step": 1.0, "peak": 3.0}, "deepspeed": {"step": 4.0, "peak": 3.0}, "torch:ddp": {"step": 0.8}}


def report() -> Report:
    def measurer(case, setting, contender):
        if setting.ranks == 2 and contender.name == "deepspeed":
            raise MeasurementError("rank 1 ended with code 1: [bad] news")
        return NUMBERS[contender.name]

    measures = (
        Measure("step", "time per step", "s", targets=(Target(1.1, than="torch:ddp"), Target(1.0, than="deepspeed"))),
        Measure("peak", "peak memory", "GiB"),
    )
    case = Case("train", "a training", "f", measures, contenders=("ours", "deepspeed", "torch:ddp"), ranks=(1, 2))
    contenders = [Contender(name, sys.executable) for name in ("ours", "deepspeed", "torch")]
    run = run_case(case, contenders, rounds=3, measurer=measurer)
    return Report("python -m benchmarks train", 3, machine.describe(), VERSIONS, {}, (summarise(run),))


def rendered(thing) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(thing)
    return console.export_text()


def test_table_shows_medians_ratios_and_targets():
    text = rendered(table(report().cases[0], VERSIONS))
    for words in ("ours 0.20.0", "DeepSpeed 0.19.8", "PyTorch (ddp) 2.13.0", "ours ÷ DeepSpeed", "1 rank", "2 ranks"):
        assert words in text
    first = next(line for line in text.splitlines() if "time per step" in line)
    assert [cell.strip() for cell in first.strip("│").split("│")] == [
        "time per step",
        "1 ± 0 s",
        "4 ± 0 s",
        "0.80 ± 0 s",
        "0.25×",
        "1.25×",
        "≤ 1.1 × torch:ddp NOT MET",
    ]
    assert "≤ 1 × deepspeed met" in text
    assert "≤ 1 × deepspeed not measured" in text
    assert "failed" in text


def test_show_gives_machine_command_and_reasons():
    console = Console(width=200, record=True, file=io.StringIO())
    show(report(), console)
    text = console.export_text()
    assert "$ python -m benchmarks train" in text
    assert f"Python {sys.version.split()[0]}" in text
    assert "deepspeed failed (2 ranks): rank 1 ended with code 1: [bad] news" in text


def test_json_shape(tmp_path):
    file = tmp_path / "new" / "results.json"
    write(report(), file)
    found = json.loads(file.read_text())
    assert set(found) == {"command", "rounds", "machine", "contenders", "missing", "cases"}
    assert {"cores", "cpu", "architecture", "memory_gib", "system", "python"} == set(found["machine"])
    setting = found["cases"][0]["settings"][0]
    assert (setting["ranks"], setting["parameters"], setting["failures"]) == (1, {}, {})
    row = setting["rows"][0]
    assert (row["measure"], row["unit"], row["better"]) == ("step", "s", "lower")
    assert row["figures"]["ours"] == {"median": 1.0, "spread": 0.0, "low": 1.0, "high": 1.0, "samples": [1.0] * 3}
    assert row["ratios"] == {"deepspeed": 0.25, "torch:ddp": 1.25}
    assert row["verdicts"][0] == {"statement": "≤ 1.1 × torch:ddp", "met": False}


def test_the_machine_is_described_without_its_name():
    assert socket.gethostname() not in [str(value) for value in machine.describe().values()]
    assert machine.cpu_model()


def test_the_command_is_shown_without_folders():
    shown = command.command_line(["import_time", "--json", "/home/me/x.json", "--python=deepspeed=/opt/py/bin/python"])
    assert shown == "python -m benchmarks import_time --json x.json --python=python"


@pytest.mark.parametrize("arguments", [["--only", "ours,jax"], ["--rounds", "0"], ["--python", "ours"], ["no_such"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "usage:" in capsys.readouterr().err


def test_every_case_is_listed(capsys):
    assert command.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert {"import_time", "init_distributed", "collective_dispatch"} <= set(discover())
    assert all(name in text for name in discover())


@pytest.mark.parametrize("case", discover().values(), ids=lambda case: case.name)
def test_declarations_hold_together(case):
    names = [measure.name for measure in case.measures]
    assert len(names) == len(set(names))
    for measure in case.measures:
        for target in measure.targets:
            assert target.contender in case.contenders
            assert target.than is None or target.than in case.contenders
