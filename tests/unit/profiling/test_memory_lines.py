"""Memory lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished
from deepspeed.profiling import memory
from deepspeed.profiling.memory import MemoryBreakdown, see_memory_usage

GB = 1024**3


@pytest.fixture
def resets(monkeypatch):
    seen = []
    device = SimpleNamespace(
        memory_allocated=lambda: GB,
        max_memory_allocated=lambda: 2 * GB,
        memory_reserved=lambda: 3 * GB,
        max_memory_reserved=lambda: 4 * GB,
        reset_peak_memory_stats=lambda: seen.append(1),
    )
    monkeypatch.setattr(memory, "get_accelerator", lambda: device)
    monkeypatch.setattr(memory, "HostMemory", lambda: SimpleNamespace(total=lambda: 8 * GB, available=lambda: 6 * GB))
    return seen


def test_see_memory_usage_writes_and_resets(resets, capsys):
    see_memory_usage("after init", force=True)
    line = capsys.readouterr().out.strip()
    assert line.endswith(
        "after init | MA 1.00 GB | Max_MA 2.00 GB | CA 3.00 GB | Max_CA 4.00 GB | host memory used 2.00 GB, 25.0 %"
    )
    assert resets == [1]


def test_without_force_nothing_happens(resets, capsys):
    see_memory_usage("after init")
    assert capsys.readouterr().out == ""
    assert resets == []


def test_another_rank_is_silent(resets, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    see_memory_usage("after init", force=True)
    assert capsys.readouterr().out == ""
    events = EventStream()
    MemoryBreakdown().attach(events)
    assert not events.wants(PhaseBegan)


def test_lines_around_forward_backward_and_step(resets, capsys):
    events = EventStream()
    breakdown = MemoryBreakdown().attach(events)
    for phase in Phase:
        events.emit(PhaseBegan(phase, 3, True))
        events.emit(PhaseFinished(phase, 3, True))
    said = [line.split(" | ")[0].rpartition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        f"{when} {what}, micro step 3" for what in ("forward", "backward", "step") for when in ("before", "after")
    ]
    breakdown.close()
    assert not events.wants(PhaseBegan)
    assert not events.wants(PhaseFinished)


def test_on_the_real_accelerator(capsys):
    see_memory_usage("now", force=True)
    assert "| MA " in capsys.readouterr().out
