"""Ranges around instrumented functions."""

from __future__ import annotations

import pytest

from deepspeed.accelerator import nvtx


class Recorder:
    def __init__(self):
        self.calls = []

    def range_push(self, msg):
        self.calls.append(msg)

    def range_pop(self):
        self.calls.append("pop")


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(nvtx, "get_accelerator", lambda: made)
    return made


def test_a_range_per_call_named_by_the_function(recorder):
    class Layer:
        @nvtx.instrument_w_nvtx
        def run(self, x, *, y):
            """Adds."""
            return x + y

    assert Layer().run(1, y=2) == 3
    assert recorder.calls == [Layer.run.__qualname__, "pop"]
    assert Layer.run.__doc__ == "Adds."


def test_the_range_ends_when_the_function_fails(recorder):
    @nvtx.instrument_w_nvtx
    def broken():
        raise KeyError("x")

    with pytest.raises(KeyError):
        broken()
    assert recorder.calls[-1] == "pop"


def test_nothing_is_recorded_while_compiling(recorder, monkeypatch):
    monkeypatch.setattr(nvtx.torch.compiler, "is_compiling", lambda: True)
    assert nvtx.instrument_w_nvtx(lambda: 5)() == 5
    assert recorder.calls == []
