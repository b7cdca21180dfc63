"""Where each parameter's elements lie when a list of parameters is spread over ranks: arithmetic, no tensors.

The two layouts are those of DeepSpeed's checkpoint files: `Block` at stages 1 and 2, `Striped` at stage 3.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Block", "FlatLayout", "Striped", "round_robin"]


class FlatLayout(Protocol):
    """How a list of parameters is spread over ranks; every rank has a shard of the same length."""

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter."""

    @property
    def world(self) -> int:
        """Ranks."""

    @property
    def shard_numel(self) -> int:
        """Elements of a rank's shard, padding included."""

    def interval(self, param: int, rank: int) -> tuple[int, int]:
        """The [start, stop) of the parameter that the rank holds; empty if it holds nothing of it."""

    def position(self, param: int, rank: int) -> int:
        """Where that interval begins in the rank's shard."""

    def holders(self, param: int) -> range:
        """The ranks that hold elements of the parameter; between the first and the last all hold equally many."""


@dataclass(frozen=True)
class Block:
    """Split the concatenation of all parameters into equal contiguous parts.

    `align` makes the shard a multiple of so many elements; `gap` begins every parameter at a multiple of so many.
    """

    numels: tuple[int, ...]
    world: int
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
        """Elements of a rank's shard, padding included."""
        unit = self.world * self.align
        return -(-self.filled // unit) * self.align

    @property
    def padded(self) -> int:
        """Elements of the concatenation, padding included."""
        return self.shard_numel * self.world

    def interval(self, param: int, rank: int) -> tuple[int, int]:
        """The [start, stop) of the parameter that the rank holds; empty if it holds nothing of it."""
        begin, numel, shard = self.starts[param], self.numels[param], self.shard_numel
        start = min(max(rank * shard - begin, 0), numel)
        stop = min(max((rank + 1) * shard - begin, 0), numel)
        return start, stop

    def position(self, param: int, rank: int) -> int:
        """Where that interval begins in the rank's shard."""
        return max(self.starts[param] - rank * self.shard_numel, 0)

    def holders(self, param: int) -> range:
        """The ranks that hold elements of the parameter; between the first and the last all hold equally many."""
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
class Striped:
    """Split every parameter by itself: rank r holds its r-th part of ceil(numel / world) elements."""

    numels: tuple[int, ...]
    world: int
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
        """Elements of a rank's shard, padding included."""
        return self.offsets[-1]

    def chunk(self, param: int) -> int:
        """Elements of a rank's part of the parameter, padding included."""
        return -(-self.numels[param] // self.world)

    def interval(self, param: int, rank: int) -> tuple[int, int]:
        """The [start, stop) of the parameter that the rank holds; empty if it holds nothing of it."""
        chunk, numel = self.chunk(param), self.numels[param]
        return min(rank * chunk, numel), min((rank + 1) * chunk, numel)

    def position(self, param: int, rank: int) -> int:
        """Where that interval begins in the rank's shard."""
        return self.offsets[param]

    def holders(self, param: int) -> range:
        """The ranks that hold elements of the parameter; between the first and the last all hold equally many."""
        chunk, numel = self.chunk(param), self.numels[param]
        return range(-(-numel // chunk)) if numel else range(0)


def round_robin(items: Sequence[int], world: int) -> list[int]:
    """Deal items to `world` hands in turn, then lay the hands one after the other."""
    return [item for hand in range(world) for item in items[hand::world]]
