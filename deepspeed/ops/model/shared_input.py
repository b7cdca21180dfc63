"""Linear layers that read one input: its gradient is summed by their products, not by additions between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["linears"]


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
        matrix = None if x is None else _rows(x)
        to_x: Tensor | None = None
        to_weights: list[Tensor | None] = [None] * ctx.count
        to_biases: list[Tensor | None] = [None] * ctx.count
        for at, grad in enumerate(grads):
            if grad is None:
                continue
            g = _rows(grad)
            if weights:
                to_x = g @ weights[at] if to_x is None else to_x.addmm_(g, weights[at])
            if for_weights[at] and matrix is not None:
                to_weights[at] = g.t() @ matrix
            if for_biases[at]:
                to_biases[at] = g.sum(0)
        return None if to_x is None else to_x.view(ctx.shape), None, *to_weights, *to_biases


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
