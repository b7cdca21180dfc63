"""Autograd functions of compression: forward chooses or exchanges, backward lets gradients pass as if it had not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["TopKBinarizer", "kept_of", "stand_in"]


def kept_of(ratio: float, count: int) -> int:
    """How many of `count` a dense ratio keeps, rounded down."""
    return math.floor(ratio * count + 1e-6)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return other.view_as(other)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def stand_in(value: Tensor, other: Tensor) -> Tensor:
    """`other`, whose gradient is that of `value`."""
    return _StandIn.apply(value, other)  # type: ignore[no-any-return,no-untyped-call]


class TopKBinarizer(torch.autograd.Function):
    """1 for the largest elements, a share `threshold` of all, and 0 for others; of equal ones the first."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, threshold: float, sigmoid: bool = False) -> Tensor:
        kept = kept_of(torch.tensor(threshold).sigmoid().item() if sigmoid else threshold, inputs.numel())
        order = inputs.detach().flatten().argsort(descending=True, stable=True)
        return torch.zeros_like(inputs).flatten().index_fill_(0, order[:kept], 1.0).view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None
