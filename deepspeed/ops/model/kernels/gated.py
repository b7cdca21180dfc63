"""act(gate) · up, element by element: the backward computes the activation again instead of keeping it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.activation import KINDS, act
from deepspeed.ops.model.kernels.highest import raise_to
from deepspeed.ops.model.kernels.tuning import cdiv
from deepspeed.ops.rehearsal import launch

__all__ = ["gated_backward", "gated_forward"]

_BLOCK = 2048


@triton.jit
def _forward(
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
def _backward(
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
            _forward, (rows, cdiv(columns, _BLOCK)),
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
            _backward, (rows, cdiv(columns, _BLOCK)),
            dy, gate, up, dgate, dup, dy if largest is None else largest, columns, gate.stride(0), up.stride(0),
            KIND=KINDS[kind], LARGEST=largest is not None, BLOCK=_BLOCK,
        )  # fmt: skip
