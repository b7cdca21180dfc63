"""What goes over the wire between tensors that ranks have whole, in parts, or as summands; autograd knows the way back.

| function | forward | backward |
|---|---|---|
| `enter` | as it is | summed over ranks |
| `leave` | summed over ranks | as it is |
| `between` | one of `joined`, `own`, `summed_part` | another one |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm

__all__ = ["Members", "Peers", "Way", "between", "enter", "joined", "leave", "own", "summed", "summed_part"]


class Peers(Protocol):
    """Ranks that have parts of a tensor, and the place of this one among them: an axis, or the members of a group."""

    @property
    def group(self) -> ProcessGroup:
        """Their process group."""

    @property
    def rank(self) -> int:
        """The place of this rank."""

    @property
    def size(self) -> int:
        """How many they are."""


@dataclass(frozen=True)
class Members:
    """The ranks of a process group that belongs to no layout."""

    group: ProcessGroup

    @property
    def rank(self) -> int:
        """The place of this rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many they are."""
        return self.group.size()

    def __deepcopy__(self, _: Any) -> Members:
        return self  # groups of processes are not copied


Way = Callable[[Tensor, Peers, Sequence[int], int], Tensor]
"""(tensor, ranks, sizes of their parts, dim) → tensor: `joined`, `own` or `summed_part`."""


def summed(tensor: Tensor, axis: Peers) -> Tensor:
    """The sum over ranks, in memory of its own."""
    result = tensor.contiguous()
    result = result.clone() if result.data_ptr() == tensor.data_ptr() else result
    comm.all_reduce(result, group=axis.group)
    return result


def joined(part: Tensor, axis: Peers, sizes: Sequence[int], dim: int) -> Tensor:
    """All ranks' parts along a dim; parts may be of unequal sizes, which all ranks know."""
    longest, given = max(sizes), part.contiguous()
    if min(sizes) < longest:
        given = part.new_zeros((*part.shape[:dim], longest, *part.shape[dim + 1 :]))
        given.narrow(dim, 0, part.shape[dim]).copy_(part)
    flat = given.new_empty((len(sizes) * given.shape[0], *given.shape[1:]))
    comm.all_gather_into_tensor(flat, given, group=axis.group)
    parts = flat.view(len(sizes), *given.shape)
    return torch.cat([parts[rank].narrow(dim, 0, size) for rank, size in enumerate(sizes)], dim=dim)


def summed_part(whole: Tensor, axis: Peers, sizes: Sequence[int], dim: int) -> Tensor:
    """This rank's part along a dim of the sum over ranks."""
    longest = max(sizes)
    stacked = whole.new_zeros((len(sizes), *whole.shape[:dim], longest, *whole.shape[dim + 1 :]))
    for place, piece in enumerate(whole.split(list(sizes), dim)):
        stacked[place].narrow(dim, 0, piece.shape[dim]).copy_(piece)
    result = whole.new_empty(stacked.shape[1:])
    comm.reduce_scatter_tensor(result, stacked.flatten(0, 1), group=axis.group)
    return result.narrow(dim, 0, sizes[axis.rank])


def own(whole: Tensor, axis: Peers, sizes: Sequence[int], dim: int) -> Tensor:
    """This rank's part along a dim."""
    return whole.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Peers) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return summed(grads[0], ctx.axis), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Peers) -> Tensor:
        return summed(tensor, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Peers, sizes: Sequence[int], dim: int, pair: tuple[Way, Way]) -> Tensor:
        ctx.given = axis, sizes, dim
        ctx.back = pair[1]
        return pair[0](tensor, axis, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0], *ctx.given), None, None, None, None


def enter(tensor: Tensor, axis: Peers) -> Tensor:
    """Into a split region: every rank's computation has a share in the gradient."""
    return _Enter.apply(tensor, axis)  # type: ignore[no-any-return,no-untyped-call]


def leave(tensor: Tensor, axis: Peers) -> Tensor:
    """Out of a split region: every rank has a summand."""
    return _Leave.apply(tensor, axis)  # type: ignore[no-any-return,no-untyped-call]


def between(tensor: Tensor, axis: Peers, sizes: Sequence[int], dim: int, pair: tuple[Way, Way]) -> Tensor:
    """From one form into another: the first way of the pair forward, the second backward."""
    dim = dim % tensor.dim()
    return _Between.apply(tensor, axis, tuple(sizes), dim, pair)  # type: ignore[no-any-return,no-untyped-call]
