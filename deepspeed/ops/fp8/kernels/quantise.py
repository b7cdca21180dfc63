"""Rounding to 8 bits: the largest magnitude, then both layouts that products read in one pass; or row by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.highest import raise_to
from deepspeed.ops.model.kernels.tuning import row_block, warps
from deepspeed.ops.rehearsal import launch

__all__ = ["SPAN", "SPAN_WARPS", "TILE", "TILE_WARPS", "largest", "round_both", "round_rows"]

SPAN, SPAN_WARPS = 32768, 8
"""Elements of a program that looks for the largest magnitude, and its warps."""
TILE, TILE_WARPS = (64, 128), 4
"""Rows and columns that a program rounds, and its warps. `python -m benchmarks.gpu_kernels --sweep` tries others."""

_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _largest(x_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    raise_to(out_ptr, tl.max(tl.abs(tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)), axis=0))


@triton.jit
def _round_both(
    x_ptr, scale_ptr, row_ptr, column_ptr, made_ptr, rows, columns, row_stride, column_stride, limit, smallest,
    TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MANY: tl.constexpr, MAKES: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    top, left = tl.program_id(0).to(tl.int64) * DOWN, tl.program_id(1).to(tl.int64) * RIGHT
    down, right = tl.arange(0, DOWN), tl.arange(0, RIGHT)
    high, wide = tl.minimum(rows - top, DOWN).to(tl.int32), tl.minimum(columns - left, RIGHT).to(tl.int32)
    inside = (down[:, None] < high) & (right[None, :] < wide)
    x = tl.load(x_ptr + (top * columns + left) + (down[:, None] * columns + right[None, :]), mask=inside, other=0.0)
    x = x.to(tl.float32)
    if MANY:  # a scale for each column
        x = x / tl.load(scale_ptr + left + right, mask=right < wide, other=1.0)[None, :]
    else:
        scale = tl.load(scale_ptr)
        if MAKES:  # it is the largest magnitude
            scale = tl.div_rn(tl.maximum(scale, smallest), limit)
            if tl.program_id(0) + tl.program_id(1) == 0:
                tl.store(made_ptr, scale)
        x = x / scale
    x = tl.minimum(tl.maximum(x, -limit), limit).to(TYPE)
    if ROWS:
        tl.store(row_ptr + (top * row_stride + left) + (down[:, None] * row_stride + right[None, :]), x, mask=inside)
    if COLUMNS:
        turned = (right[:, None] < wide) & (down[None, :] < high)
        place = (left * column_stride + top) + (right[:, None] * column_stride + down[None, :])
        tl.store(column_ptr + place, tl.trans(x), mask=turned)


@triton.jit
def _round_rows(x_ptr, out_ptr, scale_ptr, columns, limit, smallest, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), smallest) / limit
    tl.store(scale_ptr + row, scale)
    x = tl.minimum(tl.maximum(x / scale, -limit), limit)
    tl.store(out_ptr + row * columns + at, x.to(TYPE), mask=inside)


def largest(matrices: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in contiguous memory that is not empty, a float32 scalar."""
    found = torch.zeros((), dtype=torch.float32, device=matrices[0].device)
    for x in matrices:
        launch(_largest, (triton.cdiv(x.numel(), SPAN),), x, found, x.numel(), BLOCK=SPAN, num_warps=SPAN_WARPS)
    return found


def round_both(
    x: Tensor,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    *,
    made: Tensor | None = None,
    smallest: float = 0.0,
) -> None:
    """Write x / scale of a contiguous matrix to `row`, its transpose to `column`, one of which may be None.

    Rows of both are contiguous, and may lie apart. `scale` is a scalar, or has an element for each column. With `made`
    it is the largest magnitude, taken as `smallest` at least, and the scale of that is written there.
    """
    height, width = x.shape
    row_, column_ = (column if row is None else row), (row if column is None else column)
    assert row_ is not None, "one of them"
    assert column_ is not None, "one of them"
    launch(
        _round_both, (triton.cdiv(height, TILE[0]), triton.cdiv(width, TILE[1])),
        x, scale, row_, column_, scale if made is None else made, height, width, row_.stride(0), column_.stride(0),
        torch.finfo(row_.dtype).max, smallest,
        TYPE=_TYPES[row_.dtype], ROWS=row is not None, COLUMNS=column is not None, MANY=scale.dim() > 0,
        MAKES=made is not None, DOWN=TILE[0], RIGHT=TILE[1], num_warps=TILE_WARPS,
    )  # fmt: skip


def round_rows(x: Tensor, dtype: torch.dtype, smallest: float) -> tuple[Tensor, Tensor]:
    """(8-bit numbers, [rows, 1] scales) of a contiguous matrix, each row with a scale of its own."""
    height, width = x.shape
    out = torch.empty(height, width, dtype=dtype, device=x.device)
    scale = torch.empty(height, 1, dtype=torch.float32, device=x.device)
    block = row_block(width)
    if x.numel():
        launch(
            _round_rows, (height,),
            x, out, scale, width, torch.finfo(dtype).max, smallest, TYPE=_TYPES[dtype], BLOCK=block,
            num_warps=warps(block),
        )  # fmt: skip
    return out, scale
