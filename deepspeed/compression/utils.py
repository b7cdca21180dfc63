"""Autograd functions of compression: forward rounds or chooses, backward lets gradients pass as if it had not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.quantizer.quantizer import in_steps, round_groups

__all__ = [
    "AsymQuantizer",
    "BinaryQuantizer",
    "SymQuantizer",
    "TernaryQuantizer",
    "TopKBinarizer",
    "kept_of",
    "stand_in",
]


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


class _Quantizer(torch.autograd.Function):
    """Base of functions of (input, bits, least, largest, groups); a range is given for one group alone."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None, None, None


def _rounded(
    input: Tensor, num_bits: int, min_value: Any, max_value: Any, num_groups: int, *, asym: bool = False
) -> Tensor:
    if num_groups < 1 or input.numel() % num_groups:
        raise UsageError(f"{num_groups} groups do not divide the {input.numel()} elements of the tensor; use a divisor")
    groups = input.detach().reshape(num_groups, -1)
    if min_value is None or num_bits <= 2:
        return round_groups(groups, num_bits, asym=asym).values.view_as(input).to(input.dtype)
    if num_groups != 1:
        raise UsageError(f"a range (min_value, max_value) is of one group, found num_groups {num_groups}")
    ends = [
        torch.as_tensor(each, dtype=torch.float32, device=input.device).view(1, 1) for each in (min_value, max_value)
    ]
    return in_steps(groups.float(), num_bits, (ends[0], ends[1]), asym=asym).values.view_as(input).to(input.dtype)


class SymQuantizer(_Quantizer):
    """Rounds groups to codes that lie around zero."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, num_bits: int, min_value: Any = None, max_value: Any = None, num_groups: int = 1
    ) -> Tensor:
        return _rounded(input, num_bits, min_value, max_value, num_groups)


class AsymQuantizer(_Quantizer):
    """Rounds groups to codes from the least number to the largest."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, num_bits: int, min_value: Any = None, max_value: Any = None, num_groups: int = 1
    ) -> Tensor:
        return _rounded(input, num_bits, min_value, max_value, num_groups, asym=True)


class TernaryQuantizer(_Quantizer):
    """Rounds groups to zero and one magnitude with both signs."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, num_bits: int = 2, min_value: Any = None, max_value: Any = None, num_groups: int = 1
    ) -> Tensor:
        return _rounded(input, 2, None, None, num_groups)


class BinaryQuantizer(_Quantizer):
    """Rounds groups to one magnitude with both signs."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, num_bits: int = 1, min_value: Any = None, max_value: Any = None, num_groups: int = 1
    ) -> Tensor:
        return _rounded(input, 1, None, None, num_groups)
