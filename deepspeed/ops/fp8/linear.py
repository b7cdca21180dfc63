"""A linear layer whose products are of 8-bit numbers: op `fp8_product`.

forward    y = x · wᵀ     e4m3 · e4m3
backward   dx = g · w     e5m2 · e4m3
           dw = gᵀ · x    e5m2 · e4m3, or not rounded at all where rows have scales of their own

Layers that read one input may be computed together, with one scale for all their weights and one for the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.capability import compute_capability, on_cuda
from deepspeed.ops.fp8.quantise import Quantized, round_columns, round_joined, round_rows, round_tensor
from deepspeed.ops.model.gated import halves_slopes, halves_values
from deepspeed.ops.registry import implements, op, reference

MULTIPLE = 16
"""Of this each side of a matrix has to be a multiple."""

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


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


@implements("fp8_product", name="scaled_mm", requires=on_cuda & compute_capability(8, 9), rank=20)
def product_scaled(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """By torch's products of scaled 8-bit numbers; row-wise ones give bfloat16 only."""
    if not a.is_cuda:
        return product_reference(a, b, scales, dtype)
    left, right = scales
    by_rows = bool(left.dim())
    right, narrow = right.t() if by_rows else right, torch.bfloat16 if by_rows else dtype
    out = torch._scaled_mm(a, b.t(), left, right, out_dtype=narrow, use_fast_accum=fast)
    return out.to(dtype)


def emulated() -> bool:
    """True if 8-bit numbers are multiplied as float32 here, for want of units that multiply them."""
    return op("fp8_product") is product_reference


class SavedOperand(NamedTuple):
    """What the backward of a layer needs of its forward."""

    x: Tensor
    """The input, rounded and turned; where rows have scales of their own, as it was."""
    x_scale: Tensor
    w_scale: Tensor


def forward(x: Quantized, weights: Sequence[Tensor], dtype: torch.dtype, by_rows: bool) -> tuple[list[Tensor], Tensor]:
    """(x · wᵀ of each weight, the scale of the weights); several are rounded as one wide layer's weight would be."""
    if by_rows:
        (weight,) = weights
        w = round_rows(weight, VALUES)
    else:
        w = round_joined(weights, 0, VALUES, columns=False)
    parts = _need(w.rows).split([len(weight) for weight in weights])
    return [product(_need(x.rows), part, (x.scale, w.scale), dtype, fast=True) for part in parts], w.scale


def backward(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor], kept: SavedOperand, wanted: Sequence[bool], by_rows: bool
) -> tuple[Tensor | None, ...]:
    """(dx, dw of each weight), those that are `wanted`, of layers that read one input; a grad of None is zero."""
    used = [at for at, grad in enumerate(grads) if grad is not None]
    found: list[Tensor | None] = [None] * len(wanted)
    if used and by_rows:
        found = _backward_by_rows(_need(grads[0]).contiguous(), weights[0], kept, wanted)
    elif used:
        g = round_joined(
            [_need(grads[at]) for at in used], 1, GRADIENTS, rows=wanted[0], columns=any(wanted[1 + at] for at in used)
        )
        dtype = _need(grads[used[0]]).dtype
        if wanted[0]:
            found[0] = to_input(g, [weights[at] for at in used], kept.w_scale, dtype)
        parts = (None,) * len(used) if g.columns is None else g.columns.split([len(weights[at]) for at in used])
        for at, part in zip(used, parts, strict=True):
            if wanted[1 + at]:
                found[1 + at] = product(_need(part), kept.x, (g.scale, kept.x_scale), weights[at].dtype)
    return tuple(found)


def to_input(g: Quantized, weights: Sequence[Tensor], scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the input: one product for all layers, which adds up what each contributes."""
    w = round_joined(weights, 0, VALUES, rows=False, scale=scale)
    return product(_need(g.rows), _need(w.columns), (g.scale, w.scale), dtype)


def _backward_by_rows(grad: Tensor, weight: Tensor, kept: SavedOperand, wanted: Sequence[bool]) -> list[Tensor | None]:
    dx = dw = None
    if wanted[0]:
        g, w = round_rows(grad, GRADIENTS), round_columns(weight, VALUES)
        dx = product(_need(g.rows), _need(w.columns), (g.scale, w.scale), grad.dtype)
    if wanted[1]:
        dw = (grad.t() @ kept.x.to(grad.dtype)).to(weight.dtype)
    return [dx, dw]


class Fp8Linear(torch.autograd.Function):
    """x · wᵀ for a matrix x and each of several w, with 8-bit products forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Quantized, by_rows: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        """`rounded` is x, rounded: layers that are not computed together share it as well."""
        outs, scale = forward(rounded, weights, x.dtype, by_rows)
        ctx.by_rows = by_rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if by_rows else rounded.columns, rounded.scale, scale, *weights)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, x_scale, w_scale, *weights = ctx.saved_tensors
        wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        dx, *dw = backward(grads, weights, SavedOperand(x, x_scale, w_scale), wanted, ctx.by_rows)
        return dx, None, None, *dw


def _need(found: Tensor | None) -> Tensor:
    assert found is not None, "asked for"
    return found


class Fp8FeedForward(torch.autograd.Function):
    """down(act(gate(x)) · up(x)) of a matrix x; weights are gate and up [inner, width], and down [out, inner].

    The kernel between the products tells the largest magnitude of what it writes, so that no pass over memory looks for
    it; gate and up are one wide layer in both directions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Quantized, kind: str, *weights: Tensor) -> Tensor:
        """`rounded` is x, rounded; `kind` is that of the activation."""
        *first, last = weights
        w = round_joined(first, 0, VALUES, columns=False)
        both = product(_need(rounded.rows), _need(w.rows), (rounded.scale, w.scale), x.dtype, fast=True)
        y, largest = halves_values(both, kind)
        inner = round_tensor(y, VALUES, columns=rounded.columns is not None, largest=largest)
        down = round_tensor(last, VALUES, columns=False)
        ctx.kind = kind
        scales = rounded.scale, w.scale, inner.scale, down.scale
        ctx.save_for_backward(both, rounded.columns, inner.columns, *scales, *weights)
        return product(_need(inner.rows), _need(down.rows), (inner.scale, down.scale), x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, x, inner, x_scale, w_scale, inner_scale, down_scale, *first, last = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # `both` is wanted no longer than its slopes are computed
        for_x, _, _, for_gate, for_up, for_last = ctx.needs_input_grad
        before = for_x or for_gate or for_up
        dy, to_last = backward([grad], [last], SavedOperand(inner, inner_scale, down_scale), (before, for_last), False)
        if dy is None:
            return None, None, None, None, None, to_last
        slopes, largest = halves_slopes(dy, both, ctx.kind)
        del both, dy, inner
        g = round_tensor(slopes, GRADIENTS, rows=for_x, columns=for_gate or for_up, largest=largest)
        del slopes
        dx = to_input(g, first, w_scale, grad.dtype) if for_x else None
        parts = (None, None) if g.columns is None else g.columns.chunk(2)
        to_first = [
            product(_need(part), x, (g.scale, x_scale), weight.dtype) if wanted else None
            for part, weight, wanted in zip(parts, first, (for_gate, for_up), strict=True)
        ]
        return dx, None, None, *to_first, to_last
