"""Linear layers: with outputs in float32 whatever the inputs are, op `wide_linear`; several that read one input."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspeed.ops.capability import compute_capability, on_cuda
from deepspeed.ops.precompile import is_placeholder
from deepspeed.ops.registry import implements, op, reference


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, out] in float32: x [rows, in] times the transpose of the weight [out, in], as in float32."""
    result: Tensor = op("wide_linear")(x, weight)
    return result


@reference("wide_linear")
def wide_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """By copies in float32."""
    return functional.linear(x.float(), weight.float())


def in_two_parts(values: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 2 × columns]: float32 values rounded to a dtype, and beside them what was rounded off."""
    high = values.to(dtype)
    return torch.cat((high, (values - high).to(dtype)), dim=1)


class _WideLinear(torch.autograd.Function):
    """Products of bfloat16 are exact in float32, in which tensor cores sum them: no copy of the inputs is needed.

    A gradient has more digits than bfloat16 and goes through these products in two parts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        parts = in_two_parts(grad, x.dtype)
        to_x = parts @ torch.cat((weight, weight)) if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            both = torch.mm(parts.t(), x, out_dtype=torch.float32)
            to_weight = both.view(2, *weight.shape).sum(0).to(weight.dtype)
        return to_x, to_weight


@implements("wide_linear", name="tensor_cores", requires=on_cuda & compute_capability(8), rank=20)
def _by_tensor_cores(x: Tensor, weight: Tensor) -> Tensor:
    if not (x.is_cuda and x.dim() == 2 and x.dtype == weight.dtype == torch.bfloat16):
        return wide_linear_reference(x, weight)
    result: Tensor = _WideLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`functional.linear` of x [..., in] with each weight [out, in] and bias [out]; all of them are of one dtype."""
    results: tuple[Tensor, ...] = _Linears.apply(x, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return results


class _Linears(torch.autograd.Function):
    """A product that adds to what is there writes it once; an addition of its own reads two tensors and writes one.

    The backward is of plain operations, so that it has a gradient as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *params: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = params[:count], params[count:]
        for_x, for_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[2 : 2 + count]
        ctx.count, ctx.shape = count, x.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if any(for_weights) else None, *(weights if for_x else ()))
        return tuple(functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        for_weights, for_biases = ctx.needs_input_grad[2 : 2 + ctx.count], ctx.needs_input_grad[2 + ctx.count :]
        matrix = None if x is None else _matrix(x)
        to_x: Tensor | None = None
        to_weights: list[Tensor | None] = [None] * ctx.count
        to_biases: list[Tensor | None] = [None] * ctx.count
        for at, grad in enumerate(grads):
            if grad is None:
                continue
            g = _matrix(grad)
            if weights:
                to_x = g @ weights[at] if to_x is None else to_x.addmm_(g, weights[at])
            if for_weights[at] and matrix is not None:
                to_weights[at] = g.t() @ matrix
            if for_biases[at]:
                to_biases[at] = g.sum(0)
        return None if to_x is None else to_x.view(ctx.shape), None, *to_weights, *to_biases


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


WIDEST = 2**16
"""Elements of a row that a program can hold."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(x: Tensor) -> bool:
    """Whether the kernels run on such a tensor: on a GPU, or where Triton interprets them."""
    return x.dtype in _DTYPES and (x.is_cuda or is_placeholder(x.device) or os.environ.get("TRITON_INTERPRET") == "1")


def takes_rows(x: Tensor) -> bool:
    """As `takes`, for kernels that hold a whole row."""
    return takes(x) and 0 < x.shape[-1] <= WIDEST


def shaped(y: Tensor, shape: torch.Size) -> Tensor:
    """A new tensor in this shape, for an autograd function to return that keeps none of it.

    It is no view, which nobody outside of the function could change in place.
    """
    result: Tensor = torch.ops.aten._unsafe_view(y, shape)
    return result


def rows_of(x: Tensor) -> Tensor:
    """A matrix of the rows of `x`, contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()
