"""GELU of x + bias, element by element; the backward sums the bias's gradient on its way through the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.activation import KINDS, act
from deepspeed.ops.model.kernels.tuning import cdiv, programs
from deepspeed.ops.rehearsal import launch

__all__ = ["bias_gelu_backward", "bias_gelu_forward"]

_BLOCK = 1024
_COLUMNS, _ROWS = 512, 4  # of a tile in backward


@triton.jit
def _forward(x_ptr, bias_ptr, y_ptr, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = act(x + tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(y_ptr + row * columns + at, value.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, rows, columns,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.program_id(1)
    inside = at < columns
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # summed over its rows once, at the end
    for first in range(number * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * columns + at[None, :]
        whole = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + place, mask=whole, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + place, mask=whole, other=0.0).to(tl.float32)
        _, slope = act(x + bias[None, :], KIND)
        dx = dy * slope
        total += dx
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=whole)
    tl.store(dbias_ptr + number.to(tl.int64) * columns + at, tl.sum(total, axis=0), mask=inside)


def bias_gelu_forward(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Of contiguous rows."""
    rows, columns = x.shape
    y = torch.empty_like(x)
    if y.numel():
        grid = (rows, cdiv(columns, _BLOCK))
        launch(_forward, grid, x, bias, y, columns, KIND=KINDS[kind], BLOCK=_BLOCK)
    return y


def bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(gradient of x, of the bias in float32)."""
    rows, columns = x.shape
    dx = torch.empty_like(x)
    tiles, across = cdiv(rows, _ROWS), cdiv(columns, _COLUMNS)
    down = max(1, cdiv(programs(x.device, tiles * max(across, 1), per_unit=8), max(across, 1)))
    dbias = torch.zeros(down, columns, dtype=torch.float32, device=x.device)
    if dy.numel():
        launch(
            _backward,
            (across, down),
            dy,
            x,
            bias,
            dx,
            dbias,
            rows,
            columns,
            KIND=KINDS[kind],
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
    return dx, dbias.sum(0)
