"""What the reducer of gradients and the owners of gradients know of each other: entries of buckets, and protocols.

[Note: gradients that are used up] Who updates parameters while backward runs may do so only once their gradients are
whole. So each bucket is followed by a flag per gradient between hosts: on this rank nothing more comes. A gradient of
which all ranks say so is handed over when it is reduced; the others wait for the agreement before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.placement import Placement

ReductionOf = Callable[[Placement, nn.Parameter | None], Reduction]
"""How gradients of a placement, and of a parameter, are reduced; the same object for those that may share buckets."""


@dataclass(eq=False, slots=True)
class BucketEntry:
    """The gradient of one parameter, as the way to its owners sees it."""

    name: str
    param: nn.Parameter
    numel: int
    reduction: Reduction
    dtype: torch.dtype
    """In which it travels."""
    accumulate: torch.dtype
    """In which the owner adds gradients up."""
    device: torch.device
    take: Callable[[], Tensor | None] | None = None
    """Fetches the whole gradient, which is forgotten where it was; None: it is reduced where it lies."""
    piece: StatePiece | None = None
    """What this rank owns of the parameter."""
    chunk: int = 0
    """Where every rank owns so many elements, in the order of the ranks; else the next two tell."""
    rows: int = 0
    """How long its first dimension is, where there is a chunk."""
    owners: range = range(0)
    interval: Callable[[int], tuple[int, int]] | None = None
    """The elements that an owner has."""
    holder: nn.Parameter | None = None
    """The tensor on whose `.grad` it is reduced where it lies: the parameter or its master."""
    by_rows: Callable[[], None] | None = None
    """Reduces one of which ranks touch few rows, after all buckets."""
    again: float = 1.0
    """What reducing multiplies a gradient by that is the same on all ranks."""

    @property
    def kind(self) -> Hashable:
        """Entries of one kind may share a bucket."""
        return id(self.reduction), self.dtype, self.accumulate, self.device, bool(self.chunk)


class GradientGroup(Protocol):
    """Parameters, and who owns what becomes of their gradients."""

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The parameters."""

    @property
    def pieces(self) -> Sequence[StatePiece]:
        """What this rank owns of them, where gradients are taken."""

    def entries(self, reduction_of: ReductionOf) -> list[BucketEntry]:
        """Their gradients."""

    def whole_gradients(self) -> Iterator[Tensor]:
        """Gradients that were not reduced yet, or are reduced where they lie."""

    def on_arrival(self, param: nn.Parameter) -> Callable[[], None] | None:
        """What to do at once when a gradient arrives; None if nothing."""


class GradientConsumer(Protocol):
    """What uses gradients up as they are reduced, so that they never exist all at once."""

    def arrived(self, param: nn.Parameter) -> None:
        """A gradient came on this rank; it has not left yet."""

    def leaves_whole(self, param: nn.Parameter) -> bool:
        """True if what leaves now is all that this rank has of a gradient; asked once for each time that it leaves."""

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """The gradients of these are whole, of all ranks, and lie with their owners."""
