"""What goes over the wire between whole and split activations, forward and backward.

| function | forward | backward |
|---|---|---|
| `enter` | as it is | summed over ranks |
| `leave` | summed over ranks | as it is |
| `gather` | parts of the last dim side by side | this rank's part |
| `scatter` | this rank's part of the last dim | parts side by side |
| `gather_sequence` | parts of a sequence one after the other | summed over ranks, this rank's part |
| `leave_to_sequence` | summed over ranks, this rank's part of the sequence | parts one after the other |
| `scatter_sequence` | this rank's part of the sequence | parts one after the other |
| `join_sequence` | parts of a sequence one after the other | this rank's part |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.parallel import AxisGroup

__all__ = [
    "Entrance",
    "enter",
    "gather",
    "gather_sequence",
    "join_sequence",
    "leave",
    "leave_to_sequence",
    "scatter",
    "scatter_sequence",
    "summed",
]


def summed(tensor: Tensor, axis: AxisGroup) -> Tensor:
    """The sum over ranks, in memory of its own."""
    result = tensor.contiguous()
    result = result.clone() if result.data_ptr() == tensor.data_ptr() else result
    comm.all_reduce(result, group=axis.group)
    return result


def joined(part: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """All ranks' parts along a dim; parts may be of unequal sizes, which all ranks know."""
    longest, given = max(sizes), part.contiguous()
    if min(sizes) < longest:
        given = part.new_zeros((*part.shape[:dim], longest, *part.shape[dim + 1 :]))
        given.narrow(dim, 0, part.shape[dim]).copy_(part)
    flat = given.new_empty((len(sizes) * given.shape[0], *given.shape[1:]))
    comm.all_gather_into_tensor(flat, given, group=axis.group)
    parts = flat.view(len(sizes), *given.shape)
    return torch.cat([parts[rank].narrow(dim, 0, size) for rank, size in enumerate(sizes)], dim=dim)


def summed_part(whole: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """This rank's part along a dim of the sum over ranks."""
    longest = max(sizes)
    stacked = whole.new_zeros((len(sizes), *whole.shape[:dim], longest, *whole.shape[dim + 1 :]))
    for place, piece in enumerate(whole.split(list(sizes), dim)):
        stacked[place].narrow(dim, 0, piece.shape[dim]).copy_(piece)
    result = whole.new_empty(stacked.shape[1:])
    comm.reduce_scatter_tensor(result, stacked.flatten(0, 1), group=axis.group)
    return result.narrow(dim, 0, sizes[axis.rank])


def own(whole: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """This rank's part along a dim."""
    return whole.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: AxisGroup) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return summed(grads[0], ctx.axis), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: AxisGroup) -> Tensor:
        return summed(tensor, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Between(torch.autograd.Function):
    """A pair of the functions above: one forward, the other backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int, pair: Any) -> Tensor:
        ctx.given = axis, sizes, dim
        ctx.back = pair[1]
        return pair[0](tensor, axis, sizes, dim)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0], *ctx.given), None, None, None, None


def enter(tensor: Tensor, axis: AxisGroup) -> Tensor:
    """Into a split region: every rank's computation has a share in the gradient."""
    return _Enter.apply(tensor, axis)  # type: ignore[no-any-return,no-untyped-call]


class Entrance:
    """`enter` for layers that read one tensor, such as the three projections of an attention: they share one sum.

    It remembers the last tensor until its region is left, no longer.
    """

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis
        self._last: tuple[Tensor, tuple[int, bool], Tensor] | None = None

    def __deepcopy__(self, _: Any) -> Entrance:
        return self

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor inside the region."""
        if tensor.is_inference():
            return tensor
        as_it_is = tensor._version, torch.is_grad_enabled()
        if self._last is not None and self._last[0] is tensor and self._last[1] == as_it_is:
            return self._last[2]
        entered = enter(tensor, self._axis)
        self._last = tensor, as_it_is, entered
        return entered

    def forget(self) -> None:
        """The region is left."""
        self._last = None


def leave(tensor: Tensor, axis: AxisGroup) -> Tensor:
    """Out of a split region: every rank has a summand."""
    return _Leave.apply(tensor, axis)  # type: ignore[no-any-return,no-untyped-call]


def _between(tensor: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int, pair: Any) -> Tensor:
    dim = dim % tensor.dim()
    return _Between.apply(tensor, axis, tuple(sizes), dim, pair)  # type: ignore[no-any-return,no-untyped-call]


def gather(part: Tensor, axis: AxisGroup, sizes: Sequence[int]) -> Tensor:
    """A split last dim made whole, for a computation that all ranks repeat."""
    return _between(part, axis, sizes, -1, (joined, own))


def scatter(whole: Tensor, axis: AxisGroup, sizes: Sequence[int]) -> Tensor:
    """This rank's share of a last dim that all ranks have whole."""
    return _between(whole, axis, sizes, -1, (own, joined))


def gather_sequence(part: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int = 1) -> Tensor:
    """Into a split region from a split sequence."""
    return _between(part, axis, sizes, dim, (joined, summed_part))


def leave_to_sequence(tensor: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int = 1) -> Tensor:
    """Out of a split region into a split sequence."""
    return _between(tensor, axis, sizes, dim, (summed_part, joined))


def scatter_sequence(whole: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int = 1) -> Tensor:
    """This rank's part of a sequence that all ranks have whole."""
    return _between(whole, axis, sizes, dim, (own, joined))


def join_sequence(part: Tensor, axis: AxisGroup, sizes: Sequence[int], dim: int = 1) -> Tensor:
    """A split sequence made whole, for a computation that all ranks repeat."""
    return _between(part, axis, sizes, dim, (joined, own))
