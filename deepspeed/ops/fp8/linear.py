"""A linear layer whose products are of 8-bit numbers.

forward    y = x · wᵀ     e4m3 · e4m3
backward   dx = g · w     e5m2 · e4m3, or e4m3 · e4m3 where rows or blocks have scales of their own
           dw = gᵀ · x

Layers that read one input may be computed together, as one wide layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.fp8.groups import round_groups
from deepspeed.ops.fp8.product import product
from deepspeed.ops.fp8.quantise import Forms, Quantized, round_joined, round_tensor
from deepspeed.ops.model.gated import halves, halves_slopes, halves_values

MULTIPLE = 16
"""Of this each side of a matrix has to be a multiple."""

VALUES = torch.float8_e4m3fn

Scaling = Literal["tensor", "row", "block"]
"""What has a scale of its own: a tensor; a row of a product's factor; 128 numbers of it, of weights 128 × 128."""

_ROWS: Forms = ("row", "row")
FORMS: dict[str, dict[Scaling, Forms]] = {
    "input": {"row": _ROWS, "block": ("strip", "square")},  # with squares in one factor, products are faster
    "weight": {"row": _ROWS, "block": ("square", "square")},
    "gradient": {"row": _ROWS, "block": ("strip", "strip")},
}
"""What shares a scale."""


class SavedOperand(NamedTuple):
    """What the backward of a layer needs of its forward."""

    x: Tensor
    """The input, rounded and turned."""
    x_scale: Tensor
    w_scale: Tensor
    """Read where one scale serves both layouts of the weights."""


def round_input(x: Tensor, scaling: Scaling, *, columns: bool) -> Quantized:
    """The input of layers; a backward reads its columns."""
    if scaling == "tensor":
        return round_tensor(x, VALUES, columns=columns)
    return round_groups([x], 0, VALUES, FORMS["input"][scaling], columns=columns)


def round_weights(weights: Sequence[Tensor], scaling: Scaling) -> Quantized:
    """The rows of weights, one below the other, for a forward."""
    if scaling == "tensor":
        return round_joined(weights, 0, VALUES, columns=False)
    return round_groups(weights, 0, VALUES, FORMS["weight"][scaling], columns=False)


def round_gradients(grads: Sequence[Tensor], scaling: Scaling, *, rows: bool, columns: bool) -> Quantized:
    """Gradients of layers' results, side by side."""
    if scaling == "tensor":
        return round_joined(grads, 1, GRADIENTS[scaling], rows=rows, columns=columns)
    return round_groups(grads, 1, GRADIENTS[scaling], FORMS["gradient"][scaling], rows=rows, columns=columns)


GRADIENTS: dict[Scaling, torch.dtype] = {"tensor": torch.float8_e5m2, "row": VALUES, "block": VALUES}


def forward(
    x: Quantized, weights: Sequence[Tensor], dtype: torch.dtype, scaling: Scaling
) -> tuple[list[Tensor], Tensor]:
    """(x · wᵀ of each weight, the scale of the weights).

    With one scale for each tensor, several are rounded as one wide layer's weight would be.
    """
    if scaling == "tensor":
        w = round_weights(weights, scaling)
        parts = [(part, w.scale) for part in _need(w.rows).split([len(weight) for weight in weights])]
    else:
        each = [round_weights([weight], scaling) for weight in weights]
        parts, w = [(_need(part.rows), part.scale) for part in each], each[0]
    return [product(_need(x.rows), part, (x.scale, scale), dtype, fast=True) for part, scale in parts], w.scale


def backward(
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    kept: SavedOperand,
    wanted: Sequence[bool],
    scaling: Scaling,
) -> tuple[Tensor | None, ...]:
    """(dx, dw of each weight), those that are `wanted`, of layers that read one input; a grad of None is zero."""
    used = [at for at, grad in enumerate(grads) if grad is not None]
    found: list[Tensor | None] = [None] * len(wanted)
    if used:
        some = [weights[at] for at in used]
        columns = any(wanted[1 + at] for at in used)
        g = round_gradients([_need(grads[at]) for at in used], scaling, rows=wanted[0], columns=columns)
        if wanted[0]:
            found[0] = to_input(g, some, kept.w_scale, _need(grads[used[0]]).dtype, scaling)
        made = to_weights(g, some, kept, [wanted[1 + at] for at in used])
        for at, each in zip(used, made, strict=True):
            found[1 + at] = each
    return tuple(found)


def to_input(g: Quantized, weights: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, scaling: Scaling) -> Tensor:
    """The gradient of the input: one product for all layers, which adds up what each contributes."""
    if scaling == "tensor":
        w = round_joined(weights, 0, VALUES, rows=False, scale=scale)
    else:
        w = round_groups(weights, 0, VALUES, FORMS["weight"][scaling], rows=False)
    return product(_need(g.rows), _need(w.columns), (g.scale, w.turned), dtype, fast=scaling == "row")


def to_weights(
    g: Quantized, weights: Sequence[Tensor], kept: SavedOperand, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of those weights that are wanted."""
    sizes = [len(weight) for weight in weights]
    if g.columns is None:
        return [None] * len(sizes)
    scales = g.turned.split(sizes) if g.turned.dim() else [g.turned] * len(sizes)
    return [
        product(part, kept.x, (scale, kept.x_scale), weight.dtype, fast=scale.dim() > 0) if asked else None
        for part, scale, weight, asked in zip(g.columns.split(sizes), scales, weights, wanted, strict=True)
    ]


class Fp8Linear(torch.autograd.Function):
    """x · wᵀ for a matrix x and each of several w, with 8-bit products forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Quantized, scaling: Scaling, *weights: Tensor) -> tuple[Tensor, ...]:
        """`rounded` is x, rounded: layers that are not computed together share it as well."""
        outs, scale = forward(rounded, weights, x.dtype, scaling)
        ctx.scaling = scaling
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rounded.columns, rounded.turned, scale, *weights)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, x_scale, w_scale, *weights = ctx.saved_tensors
        wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        dx, *dw = backward(grads, weights, SavedOperand(x, x_scale, w_scale), wanted, ctx.scaling)
        return dx, None, None, *dw


def _need(found: Tensor | None) -> Tensor:
    assert found is not None, "asked for"
    return found


class Fp8FeedForward(torch.autograd.Function):
    """down(act(gate(x)) · up(x)) of a matrix x; weights are gate and up [inner, width], and down [out, inner].

    With one scale for each tensor, the kernel between the products tells the largest magnitude of what it writes, so
    that no pass over memory looks for it; gate and up are one wide layer in both directions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Quantized, plan: tuple[str, Scaling], *weights: Tensor) -> Tensor:
        """`rounded` is x, rounded; `plan` is the kind of the activation, and what has a scale."""
        (kind, scaling), (*first, last) = plan, weights
        w = round_weights(first, scaling)
        both = product(_need(rounded.rows), _need(w.rows), (rounded.scale, w.scale), x.dtype, fast=True)
        inner = _activated(both, kind, scaling, columns=rounded.columns is not None)
        down = round_weights([last], scaling)
        ctx.plan = plan
        scales = rounded.turned, w.scale, inner.turned, down.scale
        ctx.save_for_backward(both, rounded.columns, inner.columns, *scales, *weights)
        return product(_need(inner.rows), _need(down.rows), (inner.scale, down.scale), x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, x, inner, x_scale, w_scale, inner_scale, down_scale, *first, last = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # `both` is wanted no longer than its slopes are computed
        _, scaling = ctx.plan
        for_x, _, _, for_gate, for_up, for_last = ctx.needs_input_grad
        before = for_x or for_gate or for_up
        kept = SavedOperand(inner, inner_scale, down_scale)
        dy, to_last = backward([grad], [last], kept, (before, for_last), scaling)
        if dy is None:
            return None, None, None, None, None, to_last
        g = _slopes(dy, both, ctx.plan, rows=for_x, columns=for_gate or for_up)
        del both, dy, inner
        dx = to_input(g, first, w_scale, grad.dtype, scaling) if for_x else None
        to_first = to_weights(g, first, SavedOperand(x, x_scale, w_scale), (for_gate, for_up))
        return dx, None, None, *to_first, to_last


def _activated(both: Tensor, kind: str, scaling: Scaling, *, columns: bool) -> Quantized:
    if scaling == "tensor":
        y, largest = halves_values(both, kind)
        return round_tensor(y, VALUES, columns=columns, largest=largest)
    return round_groups([halves(both, kind)], 0, VALUES, FORMS["input"][scaling], columns=columns)


def _slopes(dy: Tensor, both: Tensor, plan: tuple[str, Scaling], *, rows: bool, columns: bool) -> Quantized:
    kind, scaling = plan
    slopes, largest = halves_slopes(dy, both, kind)
    if scaling == "tensor":
        return round_tensor(slopes, GRADIENTS[scaling], rows=rows, columns=columns, largest=largest)
    return round_gradients([slopes], scaling, rows=rows, columns=columns)
