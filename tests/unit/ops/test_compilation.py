"""What is told of kernels that Triton compiles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed.ops.precompile import Compilations


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def compiled(listener, seconds, *, home="deepspeed.ops.kernels.update", cache_hit=False, beside=0.0):
    src = SimpleNamespace(name="update_kernel", fn=SimpleNamespace(__module__=home))
    times = SimpleNamespace(total=int(seconds * 1e6))
    if isinstance(listener._clock, Clock):
        listener._clock.now += seconds - beside
    listener(src=src, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_a_line_for_each_second_of_compilation(capsys):
    listener = Compilations(clock=Clock())
    compiled(listener, 0.6)
    assert capsys.readouterr().out == ""
    compiled(listener, 0.6)
    told = capsys.readouterr().out
    assert "2 kernels in 1.2 s, the latest update_kernel of deepspeed.ops.kernels.update" in told
    compiled(listener, 0.6)
    assert capsys.readouterr().out == ""


def test_time_in_which_threads_compile_side_by_side_counts_once():
    listener = Compilations(clock=Clock())
    compiled(listener, 0.6)
    compiled(listener, 0.6, beside=0.5)
    assert (listener.count, round(listener.seconds, 3)) == (2, 0.7)


def test_what_is_found_or_foreign_is_not_told(capsys):
    heard = []
    listener = Compilations(lambda **given: heard.append(given["cache_hit"]))
    compiled(listener, 5.0, cache_hit=True)
    compiled(listener, 5.0, home="somebody.elses")
    assert (listener.count, heard) == (0, [True, False])
    assert capsys.readouterr().out == ""


def test_triton_has_such_a_listener():
    knobs = pytest.importorskip("triton.knobs", reason="triton is not installed")
    assert hasattr(knobs.compilation, "listener")
