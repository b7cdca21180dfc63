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

from deepspeed.parallel.regions import Peers, between, enter, joined, leave, own, summed, summed_part

__all__ = [
    "Entrance",
    "enter",
    "gather",
    "gather_sequence",
    "join_sequence",
    "joined",
    "leave",
    "leave_to_sequence",
    "scatter",
    "scatter_sequence",
    "summed",
]


class Entrance:
    """`enter` for layers that read one tensor, such as the three projections of an attention: they share one sum.

    It remembers the last tensor until its region is left, no longer.
    """

    def __init__(self, axis: Peers) -> None:
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


def gather(part: Tensor, axis: Peers, sizes: Sequence[int]) -> Tensor:
    """A split last dim made whole, for a computation that all ranks repeat."""
    return between(part, axis, sizes, -1, (joined, own))


def scatter(whole: Tensor, axis: Peers, sizes: Sequence[int]) -> Tensor:
    """This rank's share of a last dim that all ranks have whole."""
    return between(whole, axis, sizes, -1, (own, joined))


def gather_sequence(part: Tensor, axis: Peers, sizes: Sequence[int], dim: int = 1) -> Tensor:
    """Into a split region from a split sequence."""
    return between(part, axis, sizes, dim, (joined, summed_part))


def leave_to_sequence(tensor: Tensor, axis: Peers, sizes: Sequence[int], dim: int = 1) -> Tensor:
    """Out of a split region into a split sequence."""
    return between(tensor, axis, sizes, dim, (summed_part, joined))


def scatter_sequence(whole: Tensor, axis: Peers, sizes: Sequence[int], dim: int = 1) -> Tensor:
    """This rank's part of a sequence that all ranks have whole."""
    return between(whole, axis, sizes, dim, (own, joined))


def join_sequence(part: Tensor, axis: Peers, sizes: Sequence[int], dim: int = 1) -> Tensor:
    """A split sequence made whole, for a computation that all ranks repeat."""
    return between(part, axis, sizes, dim, (joined, own))
