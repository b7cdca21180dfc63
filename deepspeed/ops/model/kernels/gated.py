"""act(gate) · up, element by element: the backward computes the activation again instead of keeping it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import KINDS, act, cdiv, programs, raise_to
from deepspeed.ops.precompile import launch

_BLOCK = 2048


@triton.jit
def _gated_forward(
    gate_ptr, up_ptr, y_ptr, largest_ptr, columns, gate_stride, up_stride,
    KIND: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = act(gate, KIND)
    y = (value * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * columns + at, y, mask=inside)
    if LARGEST:
        raise_to(largest_ptr, tl.max(tl.abs(y.to(tl.float32)), axis=0))


@triton.jit
def _gated_backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, largest_ptr, columns, gate_stride, up_stride,
    KIND: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    dy = tl.load(dy_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = act(gate, KIND)
    dgate = (dy * up * slope).to(dgate_ptr.dtype.element_ty)
    dup = (dy * value).to(dup_ptr.dtype.element_ty)
    tl.store(dgate_ptr + row * gate_stride + at, dgate, mask=inside)
    tl.store(dup_ptr + row * up_stride + at, dup, mask=inside)
    if LARGEST:
        both = tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32)))
        raise_to(largest_ptr, tl.max(both, axis=0))


def gated_forward(gate: Tensor, up: Tensor, kind: str, largest: Tensor | None = None) -> Tensor:
    """Rows of `gate` and `up` may lie apart, as halves of a fused product do; within a row they are contiguous.

    `largest`, a float32 scalar, is raised to the largest magnitude of the result.
    """
    rows, columns = gate.shape
    y = torch.empty(rows, columns, dtype=gate.dtype, device=gate.device)
    if y.numel():
        launch(
            _gated_forward, (rows, cdiv(columns, _BLOCK)),
            gate, up, y, y if largest is None else largest, columns, gate.stride(0), up.stride(0),
            KIND=KINDS[kind], LARGEST=largest is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return y


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, kind: str, largest: Tensor | None = None
) -> None:
    """Write the gradients where the caller wants them, laid out as `gate` and `up` are; `largest` is that of both."""
    rows, columns = gate.shape
    if dy.numel():
        launch(
            _gated_backward, (rows, cdiv(columns, _BLOCK)),
            dy, gate, up, dgate, dup, dy if largest is None else largest, columns, gate.stride(0), up.stride(0),
            KIND=KINDS[kind], LARGEST=largest is not None, BLOCK=_BLOCK,
        )  # fmt: skip


_BIASED = 1024
_TILE_COLUMNS, _TILE_ROWS = 512, 4  # of a tile in backward


@triton.jit
def _bias_gelu_forward(x_ptr, bias_ptr, y_ptr, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = act(x + tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(y_ptr + row * columns + at, value.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bias_gelu_backward(
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
        grid = (rows, cdiv(columns, _BIASED))
        launch(_bias_gelu_forward, grid, x, bias, y, columns, KIND=KINDS[kind], BLOCK=_BIASED)
    return y


def bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(gradient of x, of the bias in float32)."""
    rows, columns = x.shape
    dx = torch.empty_like(x)
    tiles, across = cdiv(rows, _TILE_ROWS), cdiv(columns, _TILE_COLUMNS)
    down = max(1, cdiv(programs(x.device, tiles * max(across, 1), per_unit=8), max(across, 1)))
    dbias = torch.zeros(down, columns, dtype=torch.float32, device=x.device)
    if dy.numel():
        launch(
            _bias_gelu_backward, (across, down),
            dy, x, bias, dx, dbias, rows, columns, KIND=KINDS[kind], ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS,
        )  # fmt: skip
    return dx, dbias.sum(0)
