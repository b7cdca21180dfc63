"""The example's picture."""

from __future__ import annotations

import struct

import pytest

from examples.gpt import curve


def size(file):
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize("steps", [1, 50])
def test_draws_a_png(tmp_path, steps):
    pytest.importorskip("matplotlib")
    file = tmp_path / "loss.png"
    curve.draw(file, [5.0 - 0.05 * step for step in range(steps)], [(0, 5.5), (steps, 3.0)], "a title")
    width, height = size(file)
    assert width > height > 500


def test_smoothing_keeps_a_line_and_does_not_lag():
    line = [0.5 * step for step in range(20)]
    assert curve.smoothed(line, 3) == pytest.approx(line)
    assert curve.smoothed([0, 0, 0, 6, 0, 0, 0], 1) == pytest.approx([0, 0, 2, 2, 2, 0, 0])
    assert curve.smoothed([3.0, 1.0], 0) == [3.0, 1.0]
