"""Products of 8-bit numbers as a compiler sees them: operations of which it knows shapes and gradients, and no more.

It might trace into the layer instead and fuse the rounding with what is around it. Torch 2.11 did, on a GPU, and left
gradients out: the backward of attention was gone from the graphs. So what runs inside is what runs without a compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from deepspeed.ops.fp8.linear import VALUES, SavedOperand, backward, forward
from deepspeed.ops.fp8.quantise import Quantized, round_rows, round_tensor


def rounded(x: Tensor, by_rows: bool) -> Quantized:
    """A matrix, rounded, for the layers that read it: a compiler computes it once for all of them."""
    turns = torch.is_grad_enabled() and not by_rows  # only a backward reads columns
    rows, columns, scale = _round(x.detach(), by_rows, turns)
    return Quantized(rows, columns if turns else None, scale)


def linear(x: Tensor, weight: Tensor, held: Quantized, by_rows: bool) -> Tensor:
    """x · wᵀ, of x that is rounded already, and its gradients."""
    kept = x if held.columns is None else held.columns
    out: Tensor = _linear(x, weight, held.rows, kept, held.scale, by_rows)[0]
    return out


@library.custom_op("deepspeed::fp8_round", mutates_args=())
def _round(x: Tensor, by_rows: bool, turns: bool) -> tuple[Tensor, Tensor, Tensor]:
    found = round_rows(x, VALUES) if by_rows else round_tensor(x, VALUES, columns=turns)
    assert found.rows is not None, "asked for"
    return found.rows, found.rows.new_empty(0) if found.columns is None else found.columns, found.scale


@_round.register_fake
def _(x: Tensor, by_rows: bool, turns: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(x.shape, dtype=VALUES)
    turned = x.new_empty((x.shape[1], x.shape[0]) if turns else (0,), dtype=VALUES)
    return rows, turned, x.new_empty((x.shape[0], 1) if by_rows else (), dtype=torch.float32)


@library.custom_op("deepspeed::fp8_linear", mutates_args=())
def _linear(
    x: Tensor, weight: Tensor, rows: Tensor, kept: Tensor, scale: Tensor, by_rows: bool
) -> tuple[Tensor, Tensor]:
    """(x · wᵀ, the scale of w)."""
    (out,), w_scale = forward(Quantized(rows, None, scale), [weight], x.dtype, by_rows)
    return out, w_scale


@_linear.register_fake
def _(x: Tensor, weight: Tensor, rows: Tensor, kept: Tensor, scale: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
    w_scale = x.new_empty((weight.shape[0], 1) if by_rows else (), dtype=torch.float32)
    return x.new_empty(x.shape[0], weight.shape[0]), w_scale


@library.custom_op("deepspeed::fp8_linear_backward", mutates_args=())
def _gradients(
    grad: Tensor, weight: Tensor, kept: list[Tensor], wanted: list[bool], by_rows: bool
) -> tuple[Tensor, Tensor]:
    dx, dw = backward([grad], [weight], SavedOperand(*kept), wanted, by_rows)
    return grad.new_empty(0) if dx is None else dx, weight.new_empty(0) if dw is None else dw


@_gradients.register_fake
def _(grad: Tensor, weight: Tensor, kept: list[Tensor], wanted: list[bool], by_rows: bool) -> tuple[Tensor, Tensor]:
    dx = grad.new_empty((grad.shape[0], weight.shape[1]) if wanted[0] else (0,))
    return dx, weight.new_empty(weight.shape if wanted[1] else (0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight, _, kept, scale, ctx.by_rows = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(weight, kept, scale, output[1])


def _differentiate(ctx: Any, grad: Tensor, _scale: Tensor) -> tuple[Tensor | None, ...]:
    weight, *kept = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    dx, dw = _gradients(grad, weight, kept, wanted, ctx.by_rows)
    return dx if wanted[0] else None, dw if wanted[1] else None, None, None, None, None


_linear.register_autograd(_differentiate, setup_context=_keep)
