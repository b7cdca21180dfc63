"""A gated feed-forward layer of 8-bit products: down(act(gate(x)) · up(x)).

Its parts hand each other what they know: the kernel between the products tells the largest magnitude of what it writes,
so that no pass over memory looks for it, and gate and up are one wide layer in both directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.fp8.linear import GRADIENTS, VALUES, Kept, backward, product, to_input
from deepspeed.ops.fp8.quantise import Rounded, round_joined, round_tensor
from deepspeed.ops.model.gated import halves_slopes, halves_values

__all__ = ["Fp8FeedForward"]


class Fp8FeedForward(torch.autograd.Function):
    """Of a matrix x; weights are gate and up [inner, width], and down [out, inner]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Rounded, kind: str, *weights: Tensor) -> Tensor:
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
        dy, to_last = backward([grad], [last], Kept(inner, inner_scale, down_scale), (before, for_last), False)
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


def _need(found: Tensor | None) -> Tensor:
    assert found is not None, "asked for"
    return found
