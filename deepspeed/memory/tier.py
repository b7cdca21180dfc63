"""`Tier`: the kinds of memory that states can live in, the fastest first; `Homes`: who lives where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from deepspeed.memory.swap import SwapFile

__all__ = ["AT_HOME", "EVERYTHING_AWAY", "Allotted", "Homes", "Rooms", "Share", "Tier"]


class Tier(str, Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Rooms(Protocol):
    """Says which tier things live in; they ask in the order of the model, whose first gradients come last."""

    def place(self, sizes: Sequence[int]) -> list[Tier]:
        """The tier of each of these neighbours, from their elements; slower ones follow faster ones."""


@dataclass(frozen=True)
class Share:
    """A share of the elements of all neighbours in one tier, the last ones; the others stay on the device."""

    tier: Tier
    share: float = 1.0

    def place(self, sizes: Sequence[int]) -> list[Tier]:
        """See `Rooms`."""
        total, kept = sum(sizes), 0
        stays, found = total - self.share * total, []
        for size in sizes:
            kept += size
            found.append(self.tier if kept > stays or self.tier in found else Tier.DEVICE)
        return found


EVERYTHING_AWAY = Share(Tier.HOST)
"""Nothing stays on the device."""


class Allotted:
    """So many elements in each tier, the fastest first; what does not fit the next one any more, nor all the others."""

    def __init__(self, elements: Mapping[Tier, int]) -> None:
        """The slowest tier that has some takes whatever comes."""
        self._left = [(tier, count) for tier, count in elements.items() if count] or [(Tier.DEVICE, 0)]

    def place(self, sizes: Sequence[int]) -> list[Tier]:
        """See `Rooms`; what was placed before is remembered."""
        return [self._take(size) for size in sizes]

    def _take(self, size: int) -> Tier:
        while len(self._left) > 1 and self._left[0][1] < size:
            self._left.pop(0)
        tier, left = self._left[0]
        self._left[0] = (tier, left - size)
        return tier


@dataclass(frozen=True)
class Homes:
    """Where masters, moments and gradients of an engine's parameters live between steps."""

    rooms: Rooms = Share(Tier.DEVICE)
    away: bool = False
    """Some may leave the device."""
    pinned: bool = True
    """Host memory that the device reads and writes is page-locked."""
    tile: int = 1 << 25
    """Elements that are updated at a time."""
    once: bool = False
    """A gradient comes once a step, as far as the config says."""
    swap: SwapFile | None = None
    """Of the tier DISK."""


AT_HOME = Homes()
"""Everything lives on the device."""
