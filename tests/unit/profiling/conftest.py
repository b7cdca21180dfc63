"""A device with a clock that the test moves, which counts how often somebody waits for it."""

from __future__ import annotations

import pytest

from deepspeed.accelerator import clock as home
from deepspeed.events import Phase, PhaseBegan, PhaseFinished, StepFinished


class Clock:
    """Milliseconds of the device; `finished` is how far its work has come."""

    def __init__(self):
        self.now = 0.0
        self.finished = float("inf")
        self.waits = 0

    def Event(self, enable_timing=False):
        return DeviceEvent(self)

    def use_host_timers(self):
        return False


class DeviceEvent:
    def __init__(self, clock):
        self.clock, self.at = clock, None

    def record(self):
        self.at = self.clock.now

    def query(self):
        return self.at <= self.clock.finished

    def synchronize(self):
        if not self.query():
            self.clock.waits += 1
            self.clock.finished = self.at

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "read before it happened"
        return end.at - self.at


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(home, "get_accelerator", lambda: clock)
    return clock


@pytest.fixture
def finished():
    def make(step=1, **changes):
        facts = {
            "step": step,
            "samples": 8 * step,
            "applied": True,
            "skipped_steps": 0,
            "lr": (0.001,),
            "momentum": (),
            "loss_scale": None,
        }
        norm, loss = changes.pop("grad_norm", None), changes.pop("loss", None)
        found = {"find_grad_norm": lambda: norm, "find_loss": lambda: loss}
        return StepFinished(**{**facts, **found, **changes})

    return make


@pytest.fixture
def run_phase(clock):
    """Emit the begin and the end of a phase that takes so many milliseconds; nested ones come first."""

    def run(events, phase, milliseconds, micro_step=0, at_boundary=True, inside=()):
        events.emit(PhaseBegan(Phase(phase), micro_step, at_boundary))
        for inner in inside:
            run(events, *inner, micro_step=micro_step, at_boundary=at_boundary)
        clock.now += milliseconds
        events.emit(PhaseFinished(Phase(phase), micro_step, at_boundary))

    return run
