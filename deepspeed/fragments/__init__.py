"""What a rank holds of named tensors, as values: fragments, intervals, boxes and flat layouts. No ranks, no devices.

The two layouts are those of DeepSpeed's checkpoints: `ContiguousLayout` at stages 1 and 2, `StripedLayout` at stage 3.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "Box",
    "ContiguousLayout",
    "DimSplit",
    "FlatLayout",
    "Fragment",
    "StripedLayout",
    "boxes",
    "even",
    "even_runs",
    "intersection",
    "round_robin",
    "side_by_side",
]


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one logical tensor that this rank holds.

    `kind` is "param" (what the model computes with), "master" (what the optimizer updates), "grad", or the name of an
    optimizer state such as "exp_avg".
    """

    name: str
    kind: str
    shape: torch.Size
    """Of the whole logical tensor, before any parallelism."""
    interval: tuple[int, int]
    """The flat [start, stop) of the slice that is held here."""
    data: Tensor
    """One-dimensional, stop - start elements."""
    origin: tuple[int, ...] | None = None
    """Where this rank's tensor-parallel slice begins; None if the tensor is not sliced."""
    extent: torch.Size | None = None
    """The size of that slice; None if the tensor is not sliced."""


def intersection(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """What two intervals share; empty (start == stop) where they do not meet."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (start, start)


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cover the row-major interval [start, stop) of `shape`, in order, with at most 2·ndim - 1 boxes."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows are [first, last)
    if first > last:
        yield from _inside(shape, start // inner, start % inner, stop - start // inner * inner)
        return
    if start < first * inner:
        yield from _inside(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _inside(shape, last, 0, stop - last * inner)


def _inside(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


@dataclass(frozen=True)
class FlatLayout(ABC):
    """How a list of parameters is spread over ranks; every rank has a shard of the same length."""

    numels: tuple[int, ...]
    """Elements of each parameter."""
    world: int
    """Ranks."""

    @property
    @abstractmethod
    def shard_numel(self) -> int:
        """Elements of a rank's shard, padding included."""

    @abstractmethod
    def interval(self, param: int, rank: int) -> tuple[int, int]:
        """The [start, stop) of the parameter that the rank holds; empty if it holds nothing of it."""

    @abstractmethod
    def position(self, param: int, rank: int) -> int:
        """Where that interval begins in the rank's shard."""

    @abstractmethod
    def holders(self, param: int) -> range:
        """The ranks that hold elements of the parameter; between the first and the last all hold equally many."""


@dataclass(frozen=True)
class ContiguousLayout(FlatLayout):
    """Split the concatenation of all parameters into equal contiguous parts.

    `align` makes the shard a multiple of so many elements; `gap` begins every parameter at a multiple of so many.
    """

    align: int = 2
    gap: int = 1
    starts: tuple[int, ...] = field(init=False)
    """Where each parameter begins in the concatenation."""
    filled: int = field(init=False)
    """Elements of the concatenation before the padding at its end."""

    def __post_init__(self) -> None:
        starts, end = [], 0
        for numel in self.numels:
            start = -(-end // self.gap) * self.gap
            starts.append(start)
            end = start + numel
        object.__setattr__(self, "starts", tuple(starts))
        object.__setattr__(self, "filled", end)

    @property
    def shard_numel(self) -> int:
        unit = self.world * self.align
        return -(-self.filled // unit) * self.align

    @property
    def padded(self) -> int:
        """Elements of the concatenation, padding included."""
        return self.shard_numel * self.world

    def interval(self, param: int, rank: int) -> tuple[int, int]:
        begin, numel, shard = self.starts[param], self.numels[param], self.shard_numel
        start = min(max(rank * shard - begin, 0), numel)
        stop = min(max((rank + 1) * shard - begin, 0), numel)
        return start, stop

    def position(self, param: int, rank: int) -> int:
        return max(self.starts[param] - rank * self.shard_numel, 0)

    def holders(self, param: int) -> range:
        begin, numel, shard = self.starts[param], self.numels[param], self.shard_numel
        return range(begin // shard, (begin + numel - 1) // shard + 1) if numel else range(0)

    def members(self, rank: int) -> range:
        """The parameters of which the rank may hold something; those without elements may be among them."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        first = max(bisect_right(self.starts, low) - 1, 0)
        while first > 0 and self.starts[first - 1] + self.numels[first - 1] > low:
            first -= 1
        return range(first, bisect_left(self.starts, high))


@dataclass(frozen=True)
class StripedLayout(FlatLayout):
    """Split every parameter by itself: rank r holds its r-th part of ceil(numel / world) elements."""

    offsets: tuple[int, ...] = field(init=False)
    """Where each parameter's part begins in a rank's shard."""

    def __post_init__(self) -> None:
        offsets, end = [], 0
        for param in range(len(self.numels)):
            offsets.append(end)
            end += self.chunk(param)
        object.__setattr__(self, "offsets", (*offsets, end))

    @property
    def shard_numel(self) -> int:
        return self.offsets[-1]

    def chunk(self, param: int) -> int:
        """Elements of a rank's part of the parameter, padding included."""
        return -(-self.numels[param] // self.world)

    def interval(self, param: int, rank: int) -> tuple[int, int]:
        chunk, numel = self.chunk(param), self.numels[param]
        return min(rank * chunk, numel), min((rank + 1) * chunk, numel)

    def position(self, param: int, rank: int) -> int:
        return self.offsets[param]

    def holders(self, param: int) -> range:
        chunk, numel = self.chunk(param), self.numels[param]
        return range(-(-numel // chunk)) if numel else range(0)


def round_robin(items: Sequence[int], world: int) -> list[int]:
    """Deal items to `world` hands in turn, then lay the hands one after the other."""
    return [item for hand in range(world) for item in items[hand::world]]


Intervals = tuple[tuple[int, int], ...]
"""[start, stop) one after the other, in the order in which a rank holds them."""


def even_runs(count: int, hands: int) -> list[tuple[int, int]]:
    """Neighbouring items to `hands`, in order: as equal as can be, the first ones get more."""
    least, more = divmod(count, hands)
    starts = [hand * least + min(hand, more) for hand in range(hands + 1)]
    return list(itertools.pairwise(starts))


def even(total: int, ranks: int, unit: int = 1) -> list[tuple[int, int]]:
    """`total` elements in whole units over ranks; the last rank takes what no unit holds."""
    parts = [(start * unit, stop * unit) for start, stop in even_runs(total // unit, ranks)]
    return [*parts[:-1], (parts[-1][0], total)]


def side_by_side(sizes: Sequence[int], ranks: int, unit: int = 1) -> list[list[tuple[int, int]]]:
    """Parts that lie one after the other in a dim, each `even`: where every rank's share of each part lies."""
    starts = itertools.accumulate(sizes, initial=0)
    return [
        [(start + first, start + last) for first, last in even(size, ranks, unit)]
        for start, size in zip(starts, sizes, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class DimSplit:
    """How a tensor is cut along one dim; the intervals of all ranks together cover it.

    Those of two ranks are apart or the same: ranks may hold copies of one interval, and nothing overlaps otherwise.
    """

    dim: int
    parts: tuple[Intervals, ...]
    """By rank."""

    @classmethod
    def of(cls, dim: int, cuts: Sequence[Sequence[tuple[int, int]]]) -> DimSplit:
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
