"""The sweep over shapes of programs: every shape is in place while it is timed, and gone afterwards."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from benchmarks import gpu_kernels  # isort: skip
from benchmarks.gpu_kernels import BLOCKS, SIZES, SPANS, TILES, WARPS, Update, sweep, sweep_rounding  # isort: skip
from deepspeed.ops.fp8.kernels import quantise  # isort: skip
from deepspeed.ops.kernels import many  # isort: skip


def test_shares_of_a_copy_the_best_first():
    before, seen = many.SHAPE, []

    def time(run):
        run()
        shape = many.SHAPE
        seen.append((shape.block, shape.warps))
        return sum(SIZES) * 14 / shape.block / shape.warps

    updates = [
        Update("torch", lambda: None, 28, theirs=True),
        Update("lion 8 bits", lambda: seen.append("run"), 14),
    ]
    (line,) = sweep(updates, 4 * 4096 * 8, time)
    assert [each for each in seen if each != "run"] == [(block, warps) for block in BLOCKS for warps in WARPS]
    assert line.split()[:5] == ["lion", "8", "bits", "4096/8", "25.0%"]
    assert "1024/4* 3.1%" in line
    assert many.SHAPE is before, "as it was"


def test_rounding_with_programs_of_other_shapes(monkeypatch):
    seen = {"fp8 largest": [], "fp8 rounding": []}
    notes = {
        "fp8 largest": lambda: seen["fp8 largest"].append((quantise.SPAN, quantise.SPAN_WARPS)),
        "fp8 rounding": lambda: seen["fp8 rounding"].append((quantise.TILE, quantise.TILE_WARPS)),
    }
    monkeypatch.setattr(gpu_kernels, "_roundings", lambda: {name: (note, 1) for name, note in notes.items()})
    before = quantise.SPAN, quantise.TILE
    lines = list(sweep_rounding(1.0, lambda run: run() or 1.0))
    assert seen["fp8 largest"] == [(span, warps) for span in SPANS for warps in WARPS]
    assert seen["fp8 rounding"] == [(tile, warps) for tile in TILES for warps in WARPS]
    assert "16384/8* 100.0%" in lines[0]
    assert "32x128/4* 100.0%" in lines[1]
    assert before == (quantise.SPAN, quantise.TILE), "as it was"


def test_blocks_of_codes_are_whole_shares():
    from deepspeed.ops.blockwise import BLOCK

    assert many.SHAPE.block % BLOCK == 0
