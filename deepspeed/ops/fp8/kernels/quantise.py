"""Rounding to 8 bits: the largest magnitude, then both layouts that products read in one pass; or row by row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.tuning import row_block, warps
from deepspeed.ops.rehearsal import launch

__all__ = ["SIDE", "SIDE_WARPS", "SPAN", "SPAN_WARPS", "largest", "round_both", "round_rows"]

SPAN, SPAN_WARPS = 8192, 8
"""Elements of a program that looks for the largest magnitude, and its warps."""
SIDE, SIDE_WARPS = 64, 4
"""Of a square that a program rounds, and its warps. `python -m benchmarks.gpu_kernels --sweep` tries others."""

_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _largest(x_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.atomic_max(out_ptr, tl.max(tl.abs(x), axis=0))


@triton.jit
def _round_both(
    x_ptr, scale_ptr, row_ptr, column_ptr, made_ptr, rows, columns, limit, smallest,
    TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MANY: tl.constexpr, MAKES: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    down = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    right = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = (down[:, None] < rows) & (right[None, :] < columns)
    x = tl.load(x_ptr + down[:, None] * columns + right[None, :], mask=inside, other=0.0).to(tl.float32)
    if MANY:  # a scale for each column
        x = x / tl.load(scale_ptr + right, mask=right < columns, other=1.0)[None, :]
    else:
        scale = tl.load(scale_ptr)
        if MAKES:  # it is the largest magnitude
            scale = tl.div_rn(tl.maximum(scale, smallest), limit)
            if tl.program_id(0) + tl.program_id(1) == 0:
                tl.store(made_ptr, scale)
        x = x / scale
    x = tl.minimum(tl.maximum(x, -limit), limit).to(TYPE)
    if ROWS:
        tl.store(row_ptr + down[:, None] * columns + right[None, :], x, mask=inside)
    if COLUMNS:
        turned = (right[:, None] < columns) & (down[None, :] < rows)
        tl.store(column_ptr + right[:, None] * rows + down[None, :], tl.trans(x), mask=turned)


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


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of contiguous memory that is not empty, a float32 scalar."""
    found = torch.zeros((), dtype=torch.float32, device=x.device)
    launch(_largest, (triton.cdiv(x.numel(), SPAN),), x, found, x.numel(), BLOCK=SPAN, num_warps=SPAN_WARPS)
    return found


def round_both(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    made: Tensor | None = None,
    smallest: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:
    """(x / scale, its transpose) of a contiguous matrix, each contiguous, or None where it is not asked for.

    `scale` is a scalar, or has an element for each column. With `made` it is the largest magnitude, taken as
    `smallest` at least, and the scale of that is written there.
    """
    height, width = x.shape
    row = torch.empty(height, width, dtype=dtype, device=x.device) if rows else None
    column = torch.empty(width, height, dtype=dtype, device=x.device) if columns else None
    anything = row if row is not None else column
    launch(
        _round_both, (triton.cdiv(height, SIDE), triton.cdiv(width, SIDE)),
        x, scale, anything if row is None else row, anything if column is None else column,
        scale if made is None else made, height, width, torch.finfo(dtype).max, smallest,
        TYPE=_TYPES[dtype], ROWS=rows, COLUMNS=columns, MANY=scale.dim() > 0, MAKES=made is not None,
        SIDE=SIDE, num_warps=SIDE_WARPS,
    )  # fmt: skip
    return row, column


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
