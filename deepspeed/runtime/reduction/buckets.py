"""Which gradients travel together: pure planning over sizes, the same on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from deepspeed.zero.gradients.order import pack_buckets

__all__ = ["Plan", "plan"]

FIRST_BYTES = 1 << 20  # a small first bucket starts communicating early
BUCKET_BYTES = 25 << 20
ALONE_BYTES = 4 << 20  # from this size on a gradient is reduced where it lies; packing would cost a copy


@dataclass(frozen=True)
class Plan:
    """One bucket: positions of the parameters that are packed, and of those that are reduced where they lie."""

    packed: tuple[int, ...]
    alone: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """All positions."""
        return self.packed + self.alone


def plan(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int = BUCKET_BYTES) -> list[Plan]:
    """Buckets of at most `limit` bytes (or one parameter), of one kind (dtype and device) each.

    The last parameter comes first, as its gradient does; buckets are ordered by when they are likely complete.
    """
    last_first = range(len(sizes))[::-1]
    done = pack_buckets(last_first, sizes, kinds, limit, first=FIRST_BYTES)
    return [
        Plan(
            tuple(position for position in members if sizes[position] < ALONE_BYTES),
            tuple(position for position in members if sizes[position] >= ALONE_BYTES),
        )
        for members in done
    ]
