"""A linear layer whose products are of 8-bit numbers: op `fp8_product`.

forward    y = x · wᵀ     e4m3 · e4m3
backward   dx = g · w     e5m2 · e4m3
           dw = gᵀ · x    e5m2 · e4m3, or not rounded at all where rows have scales of their own
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.capability import compute_capability, on_cuda
from deepspeed.ops.fp8.quantise import Rounded, round_columns, round_rows, round_tensor
from deepspeed.ops.registry import implementation, op, reference

__all__ = ["MULTIPLE", "SCALINGS", "Fp8Linear", "Kept", "backward", "emulated", "forward", "product"]

SCALINGS = ("tensor", "row")
MULTIPLE = 16
"""Of this each side of a matrix has to be a multiple."""

_VALUES, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def product(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """(a · bᵀ) times its scales, in `dtype`: a is [m, k], b [n, k]; scales are scalars, or [m, 1] and [n, 1].

    `fast` sums in fewer bits where the hardware has that.
    """
    result: Tensor = op("fp8_product")(a, b, scales, dtype, fast=fast)
    return result


@reference("fp8_product")
def product_reference(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """The same numbers multiplied as float32: right everywhere, and fast nowhere."""
    left, right = scales
    return ((a.float() @ b.float().t()) * left * (right.t() if right.dim() else right)).to(dtype)


def product_scaled(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """By torch's products of scaled 8-bit numbers; row-wise ones give bfloat16 only."""
    if not a.is_cuda:
        return product_reference(a, b, scales, dtype)
    left, right = scales
    by_rows = bool(left.dim())
    out = torch._scaled_mm(
        a,
        b.t(),
        left,
        right.t() if by_rows else right,
        out_dtype=torch.bfloat16 if by_rows else dtype,
        use_fast_accum=fast,
    )
    return out.to(dtype)


def emulated() -> bool:
    """True if 8-bit numbers are multiplied as float32 here, for want of units that multiply them."""
    return op("fp8_product") is product_reference


@implementation("fp8_product", name="scaled_mm", requires=on_cuda & compute_capability(8, 9), rank=20)
def _load_scaled() -> Callable[..., Tensor]:
    return product_scaled


class Kept(NamedTuple):
    """What the backward of a layer needs of its forward."""

    x: Tensor
    """The input, rounded and turned; where rows have scales of their own, as it was."""
    x_scale: Tensor
    w_scale: Tensor


def forward(x: Tensor, weight: Tensor, rounded: Rounded, by_rows: bool) -> tuple[Tensor, Tensor]:
    """(x · wᵀ, the scale of w); `rounded` is x, rounded: several layers that read one input share it."""
    w = round_rows(weight, _VALUES) if by_rows else round_tensor(weight, _VALUES, columns=False)
    out = product(_need(rounded.rows), _need(w.rows), (rounded.scale, w.scale), x.dtype, fast=True)
    return out, w.scale


def backward(
    grad: Tensor, weight: Tensor, kept: Kept, wanted: Sequence[bool], by_rows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dw), those that are wanted."""
    for_x, for_weight = wanted
    dx = dw = None
    grad = grad.contiguous()
    if by_rows:
        if for_x:
            g, w = round_rows(grad, _GRADIENTS), round_columns(weight, _VALUES)
            dx = product(_need(g.rows), _need(w.columns), (g.scale, w.scale), grad.dtype)
        if for_weight:
            dw = (grad.t() @ kept.x.to(grad.dtype)).to(weight.dtype)
        return dx, dw
    g = round_tensor(grad, _GRADIENTS, rows=for_x, columns=for_weight)
    if for_x:
        w = round_tensor(weight, _VALUES, rows=False, scale=kept.w_scale)
        dx = product(_need(g.rows), _need(w.columns), (g.scale, w.scale), grad.dtype)
    if for_weight:
        dw = product(_need(g.columns), kept.x, (g.scale, kept.x_scale), weight.dtype)
    return dx, dw


class Fp8Linear(torch.autograd.Function):
    """x · wᵀ for a matrix x, with 8-bit products forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: Rounded, by_rows: bool) -> Tensor:
        """`rounded` is x, rounded."""
        out, scale = forward(x, weight, rounded, by_rows)
        ctx.by_rows = by_rows
        ctx.save_for_backward(weight, x if by_rows else rounded.columns, rounded.scale, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        return *backward(grad, weight, Kept(*kept), ctx.needs_input_grad[:2], ctx.by_rows), None, None


def _need(found: Tensor | None) -> Tensor:
    assert found is not None, "asked for"
    return found
