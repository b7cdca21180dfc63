"""Tokens that several tensor-parallel ranks have alike: each takes its part, and all get the whole again."""

from __future__ import annotations

from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.mpu import current_layout
from deepspeed.parallel.regions import between, joined, own

__all__ = ["drop_tokens", "gather_tokens", "parts_of", "whole_of"]


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """This tensor-parallel rank's part of a tensor along a dim; gradients come from all of them."""
    axis = _tensor_axis()
    return input_ if axis is None else parts_of(input_, dim, axis)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """The parts of all tensor-parallel ranks along a dim; the gradient is this rank's part."""
    axis = _tensor_axis()
    return input_ if axis is None else whole_of(input_, dim, axis)


def parts_of(values: Tensor, dim: int, axis: AxisGroup) -> Tensor:
    """This rank's part along a dim; backward puts the parts of all ranks together."""
    if values.shape[dim] % axis.size:
        raise UsageError(
            f"dim {dim} of a tensor of shape {tuple(values.shape)} cannot be cut into {axis.size} equal parts, one for "
            "each tensor-parallel rank; pad it to a multiple"
        )
    return between(values, axis, [values.shape[dim] // axis.size] * axis.size, dim, (own, joined))


def whole_of(values: Tensor, dim: int, axis: AxisGroup) -> Tensor:
    """The parts of all ranks along a dim; backward takes this rank's part."""
    return between(values, axis, [values.shape[dim]] * axis.size, dim, (joined, own))


def _tensor_axis() -> AxisGroup | None:
    axis = current_layout.get().tensor if current_layout.is_known else None
    return axis if axis is not None and axis.size > 1 else None
