"""Products of 8-bit numbers as a compiler sees them: operations of which it knows shapes and gradients, and no more.

It might trace into the layer instead and fuse the rounding with what is around it. Torch 2.11 did, on a GPU, and left
gradients out: the backward of attention was gone from the graphs. So what runs inside is what runs without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from deepspeed.ops.fp8.groups import scales
from deepspeed.ops.fp8.linear import FORMS, VALUES, SavedOperand, Scaling, backward, forward, round_input
from deepspeed.ops.fp8.quantise import Quantized


def rounded(x: Tensor, scaling: Scaling) -> Quantized:
    """A matrix, rounded, for the layers that read it: a compiler computes it once for all of them."""
    wanted = torch.is_grad_enabled()  # only a backward reads columns
    rows, columns, scale, turned = _round(x.detach(), scaling, wanted)
    return Quantized(rows, columns if wanted else None, scale, turned)


def linear(x: Tensor, weight: Tensor, held: Quantized, scaling: Scaling) -> Tensor:
    """x · wᵀ, of x that is rounded already, and its gradients."""
    kept = x if held.columns is None else held.columns
    out: Tensor = _linear(x, weight, held.rows, held.scale, kept, held.turned, scaling)[0]
    return out


@library.custom_op("deepspeed::fp8_round", mutates_args=())
def _round(x: Tensor, scaling: str, turns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = round_input(x, scaling, columns=turns)  # type: ignore[arg-type]
    assert found.rows is not None, "asked for"
    columns = found.rows.new_empty(0) if found.columns is None else found.columns
    return found.rows, columns, found.scale, found.turned.clone() if found.turned is found.scale else found.turned


@_round.register_fake
def _(x: Tensor, scaling: str, turns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, scale = x.new_empty(x.shape, dtype=VALUES), _scales(x, x.shape, scaling, "input", 0)
    if not turns:
        return rows, rows.new_empty(0), scale, torch.empty_like(scale)
    turned = x.shape[::-1]
    return rows, x.new_empty(turned, dtype=VALUES), scale, _scales(x, turned, scaling, "input", 1)


def _scales(x: Tensor, shape: Sequence[int], scaling: str, role: str, layout: int) -> Tensor:
    if scaling == "tensor":
        return x.new_empty((), dtype=torch.float32)
    return scales(shape, FORMS[role][scaling][layout], x.device)  # type: ignore[index]


@library.custom_op("deepspeed::fp8_linear", mutates_args=())
def _linear(
    x: Tensor, weight: Tensor, rows: Tensor, scale: Tensor, columns: Tensor, turned: Tensor, scaling: str
) -> tuple[Tensor, Tensor]:
    """(x · wᵀ, the scale of w)."""
    held = Quantized(rows, None, scale, turned)
    (out,), w_scale = forward(held, [weight], x.dtype, scaling)  # type: ignore[arg-type]
    return out, w_scale


@_linear.register_fake
def _(
    x: Tensor, weight: Tensor, rows: Tensor, scale: Tensor, columns: Tensor, turned: Tensor, scaling: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), _scales(x, weight.shape, scaling, "weight", 0)


@library.custom_op("deepspeed::fp8_linear_backward", mutates_args=())
def _gradients(
    grad: Tensor, weight: Tensor, kept: list[Tensor], wanted: list[bool], scaling: str
) -> tuple[Tensor, Tensor]:
    dx, dw = backward([grad], [weight], SavedOperand(*kept), wanted, scaling)  # type: ignore[arg-type]
    return grad.new_empty(0) if dx is None else dx, weight.new_empty(0) if dw is None else dw


@_gradients.register_fake
def _(grad: Tensor, weight: Tensor, kept: list[Tensor], wanted: list[bool], scaling: str) -> tuple[Tensor, Tensor]:
    dx = grad.new_empty((grad.shape[0], weight.shape[1]) if wanted[0] else (0,))
    return dx, weight.new_empty(weight.shape if wanted[1] else (0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight, _, _, columns, turned, ctx.scaling = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(weight, columns, turned, output[1])


def _differentiate(ctx: Any, grad: Tensor, _scale: Tensor) -> tuple[Tensor | None, ...]:
    weight, *kept = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    dx, dw = _gradients(grad, weight, kept, wanted, ctx.scaling)
    return dx if wanted[0] else None, dw if wanted[1] else None, None, None, None, None, None


_linear.register_autograd(_differentiate, setup_context=_keep)
