"""What is told of kernels that Triton compiles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed.ops.compilation import Compilations


def compiled(listener, seconds, *, home="deepspeed.ops.kernels.update", cache_hit=False):
    src = SimpleNamespace(name="update_kernel", fn=SimpleNamespace(__module__=home))
    times = SimpleNamespace(total=int(seconds * 1e6))
    listener(src=src, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_a_line_for_each_second_of_compilation(capsys):
    listener = Compilations()
    compiled(listener, 0.6)
    assert capsys.readouterr().out == ""
    compiled(listener, 0.6)
    told = capsys.readouterr().out
    assert "2 kernels in 1.2 s, the latest update_kernel of deepspeed.ops.kernels.update" in told
    compiled(listener, 0.6)
    assert capsys.readouterr().out == ""


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
