"""`Split`: which intervals of one dim of a tensor each tensor-parallel rank holds; cutting and joining."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Intervals", "Split", "deal", "even", "side_by_side"]

Intervals = tuple[tuple[int, int], ...]
"""[start, stop) one after the other, in the order in which a rank holds them."""


def deal(count: int, hands: int) -> list[tuple[int, int]]:
    """Neighbouring items to `hands`, in order: as equal as can be, the first ones get more."""
    least, more = divmod(count, hands)
    starts = [hand * least + min(hand, more) for hand in range(hands + 1)]
    return list(itertools.pairwise(starts))


def even(total: int, ranks: int, unit: int = 1) -> list[tuple[int, int]]:
    """`total` elements in whole units over ranks; the last rank takes what no unit holds."""
    parts = [(start * unit, stop * unit) for start, stop in deal(total // unit, ranks)]
    return [*parts[:-1], (parts[-1][0], total)]


def side_by_side(sizes: Sequence[int], ranks: int, unit: int = 1) -> list[list[tuple[int, int]]]:
    """Parts that lie one after the other in a dim, each `even`: where every rank's share of each part lies."""
    starts = itertools.accumulate(sizes, initial=0)
    return [
        [(start + first, start + last) for first, last in even(size, ranks, unit)]
        for start, size in zip(starts, sizes, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor is cut along one dim; the intervals of all ranks together cover it.

    Those of two ranks are apart or the same: ranks may hold copies of one interval, and nothing overlaps otherwise.
    """

    dim: int
    parts: tuple[Intervals, ...]
    """By rank."""

    @classmethod
    def of(cls, dim: int, cuts: Sequence[Sequence[tuple[int, int]]]) -> Split:
        """Of the cuts of each fused part: `cuts[part][rank]` is where in the whole dim that rank's share lies."""
        ranks = len(cuts[0])
        return cls(dim, tuple(tuple(cut[rank] for cut in cuts if cut[rank][0] < cut[rank][1]) for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        return len(self.parts)

    @property
    def total(self) -> int:
        """Elements of the whole dim."""
        return max((stop for part in self.parts for _, stop in part), default=0)

    @property
    def shared(self) -> bool:
        """Whether some elements lie on several ranks."""
        return sum(self.size(rank) for rank in range(self.ranks)) > self.total

    def first_holder(self, rank: int) -> int:
        """The first rank that holds what this rank holds: itself, unless it holds a copy."""
        return self.parts.index(self.parts[rank])

    def size(self, rank: int) -> int:
        """Elements of the dim that a rank holds."""
        return sum(stop - start for start, stop in self.parts[rank])

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """Of a rank's part of a tensor of that shape."""
        return (*whole[: self.dim], self.size(rank), *whole[self.dim + 1 :])

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Of the tensor that a part of this shape belongs to."""
        return (*part[: self.dim], self.total, *part[self.dim + 1 :])

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part, contiguous; a view where it is one."""
        return self.cut_with(lambda start, stop: whole.narrow(self.dim, start, stop - start), rank)

    def cut_with(self, read: Callable[[int, int], Tensor], rank: int) -> Tensor:
        """The same of a tensor that is read interval by interval."""
        import torch  # heavy, and needed here alone

        pieces = [read(start, stop) for start, stop in self.parts[rank]]
        if not pieces:
            return read(0, 0).contiguous()
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, of every rank's part."""
        whole = parts[0].new_empty(self.whole_shape(parts[0].shape))
        for rank, part in enumerate(parts):
            self.place(part, rank, whole)
        return whole

    def place(self, part: Tensor, rank: int, whole: Tensor) -> None:
        """Write a rank's part where it belongs."""
        reached = 0
        for start, stop in self.parts[rank]:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, reached, stop - start))
            reached += stop - start
