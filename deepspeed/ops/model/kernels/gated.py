"""act(gate) · up, element by element: the backward computes the activation again instead of keeping it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.activation import KINDS, act
from deepspeed.ops.rehearsal import launch

__all__ = ["gated_backward", "gated_forward"]

_BLOCK = 1024


@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, columns, gate_stride, up_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = act(gate, KIND)
    tl.store(y_ptr + row * columns + at, (value * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, columns, gate_stride, up_stride,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    dy = tl.load(dy_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = act(gate, KIND)
    tl.store(dgate_ptr + row * gate_stride + at, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * up_stride + at, (dy * value).to(dup_ptr.dtype.element_ty), mask=inside)


def gated_forward(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Rows of `gate` and `up` may lie apart, as halves of a fused product do; within a row they are contiguous."""
    rows, columns = gate.shape
    y = torch.empty(rows, columns, dtype=gate.dtype, device=gate.device)
    if y.numel():
        grid = (rows, triton.cdiv(columns, _BLOCK))
        launch(_forward, grid, gate, up, y, columns, gate.stride(0), up.stride(0), KIND=KINDS[kind], BLOCK=_BLOCK)
    return y


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, kind: str) -> None:
    """Write the gradients where the caller wants them, laid out as `gate` and `up` are."""
    rows, columns = gate.shape
    if dy.numel():
        grid = (rows, triton.cdiv(columns, _BLOCK))
        launch(
            _backward,
            grid,
            dy,
            gate,
            up,
            dgate,
            dup,
            columns,
            gate.stride(0),
            up.stride(0),
            KIND=KINDS[kind],
            BLOCK=_BLOCK,
        )
