"""Rounding to 8 bits: the largest magnitude, then both layouts that products read in one pass; or row by row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import cdiv, raise_to, row_block, warps
from deepspeed.ops.precompile import launch

SPAN, SPAN_WARPS = 16384, 8
"""Elements of a program that looks for the largest magnitude, and its warps."""
TILE, TILE_WARPS = (32, 128), 4
"""Rows and columns that a program rounds, and its warps. `python -m benchmarks.gpu_kernels --sweep` tries others."""

FEW = 3
"""Matrices that one launch takes."""

TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _largest(
    first_ptr, second_ptr, third_ptr, out_ptr, first, second, third, second_from, third_from, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK  # in whole blocks of the first tensor, then of the others
    x_ptr, numel = first_ptr, first
    if start >= third_from:
        x_ptr, numel = third_ptr, third
        start -= third_from
    elif start >= second_from:
        x_ptr, numel = second_ptr, second
        start -= second_from
    at = start + tl.arange(0, BLOCK)
    raise_to(out_ptr, tl.max(tl.abs(tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)), axis=0))


@triton.jit
def _round_tile(
    x_ptr, scale_ptr, row_ptr, column_ptr, made_ptr, top, left, rows, columns, row_stride, column_stride, limit,
    smallest, makes,
    TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MAKES: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    down, right = tl.arange(0, DOWN), tl.arange(0, RIGHT)
    high, wide = tl.minimum(rows - top, DOWN).to(tl.int32), tl.minimum(columns - left, RIGHT).to(tl.int32)
    inside = (down[:, None] < high) & (right[None, :] < wide)
    x = tl.load(x_ptr + (top * columns + left) + (down[:, None] * columns + right[None, :]), mask=inside, other=0.0)
    x = x.to(tl.float32)
    scale = tl.load(scale_ptr)
    if MAKES:  # it is the largest magnitude
        scale = tl.div_rn(tl.maximum(scale, smallest), limit)
        if makes:
            tl.store(made_ptr, scale)
    x = tl.minimum(tl.maximum(x / scale, -limit), limit).to(TYPE)
    if ROWS:
        tl.store(row_ptr + (top * row_stride + left) + (down[:, None] * row_stride + right[None, :]), x, mask=inside)
    if COLUMNS:
        turned = (right[:, None] < wide) & (down[None, :] < high)
        place = (left * column_stride + top) + (right[:, None] * column_stride + down[None, :])
        tl.store(column_ptr + place, tl.trans(x), mask=turned)


@triton.jit
def _round_joined(
    first_ptr, second_ptr, third_ptr, scale_ptr, row_ptr, column_ptr, made_ptr, first, second, third, other,
    second_from, third_from, row_stride, column_stride, limit, smallest,
    TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MAKES: tl.constexpr, BELOW: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    # Matrices that are one below the other, or side by side: in whole tiles of the first, then of the others.
    makes = tl.program_id(0) + tl.program_id(1) == 0
    along = tl.program_id(0).to(tl.int64) * (DOWN if BELOW else RIGHT)
    across = tl.program_id(1).to(tl.int64) * (RIGHT if BELOW else DOWN)
    x_ptr, size, place = first_ptr, first, tl.zeros((), dtype=tl.int64)
    if along >= third_from:
        x_ptr, size, place = third_ptr, third, place + first + second
        along -= third_from
    elif along >= second_from:
        x_ptr, size, place = second_ptr, second, place + first
        along -= second_from
    if BELOW:
        _round_tile(
            x_ptr, scale_ptr, row_ptr + place * row_stride, column_ptr + place, made_ptr,
            along, across, size, other, row_stride, column_stride, limit, smallest, makes,
            TYPE, ROWS, COLUMNS, MAKES, DOWN, RIGHT,
        )  # fmt: skip
    else:
        _round_tile(
            x_ptr, scale_ptr, row_ptr + place, column_ptr + place * column_stride, made_ptr,
            across, along, other, size, row_stride, column_stride, limit, smallest, makes,
            TYPE, ROWS, COLUMNS, MAKES, DOWN, RIGHT,
        )  # fmt: skip


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
    for some in batched(matrices):
        sizes, starts, count = _in_row([x.numel() for x in some], SPAN)
        launch(_largest, (count,), *_three(some), found, *sizes, *starts, BLOCK=SPAN, num_warps=SPAN_WARPS)
    return found


def batched(matrices: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """As many as one launch takes, each."""
    return [matrices[start : start + FEW] for start in range(0, len(matrices), FEW)]


def round_joined(
    matrices: Sequence[Tensor],
    dim: int,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    *,
    made: Tensor | None = None,
    smallest: float = 0.0,
) -> None:
    """Write x / scale to `row`, its transpose to `column`, one of which may be None: rows of them may lie apart.

    x is up to three contiguous matrices, one below the other (`dim` 0) or side by side (1). With `made` the scalar
    `scale` is the largest magnitude, taken as `smallest` at least, and the scale of that is written there.
    """
    sizes, starts, count = _in_row([x.shape[dim] for x in matrices], TILE[dim])
    other = matrices[0].shape[1 - dim]
    row_, column_ = (column if row is None else row), (row if column is None else column)
    assert row_ is not None, "one of them"
    assert column_ is not None, "one of them"
    launch(
        _round_joined, (count, cdiv(other, TILE[1 - dim])),
        *_three(matrices), scale, row_, column_, scale if made is None else made, *sizes, other, *starts,
        row_.stride(0), column_.stride(0), torch.finfo(row_.dtype).max, smallest,
        TYPE=TYPES[row_.dtype], ROWS=row is not None, COLUMNS=column is not None, MAKES=made is not None,
        BELOW=dim == 0, DOWN=TILE[0], RIGHT=TILE[1], num_warps=TILE_WARPS,
    )  # fmt: skip


def _in_row(sizes: Sequence[int], part: int) -> tuple[list[int], list[int], int]:
    """(three sizes, where the second and the third begin, how many parts there are), each in whole parts."""
    ends = list(accumulate(cdiv(size, part) for size in sizes))
    missing = [0] * (FEW - len(sizes))
    return [*sizes, *missing], [part * end for end in (*ends, *[ends[-1]] * FEW)[: FEW - 1]], ends[-1]


def _three(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    return [*matrices, *[matrices[0]] * (FEW - len(matrices))]


def round_rows(x: Tensor, out: Tensor, scale: Tensor, smallest: float) -> None:
    """Write the 8-bit numbers and the [rows, 1] scales of a contiguous matrix, each row with a scale of its own."""
    height, width = x.shape
    block = row_block(width)
    if x.numel():
        launch(
            _round_rows, (height,),
            x, out, scale, width, torch.finfo(out.dtype).max, smallest, TYPE=TYPES[out.dtype], BLOCK=block,
            num_warps=warps(block),
        )  # fmt: skip
