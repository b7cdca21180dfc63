"""`Tier`: the kinds of memory that states can live in, the fastest first; `Homes`: who lives where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deepspeed.memory.swap import SwapFile

__all__ = ["AT_HOME", "Homes", "Tier"]


class Tier(str, Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Homes:
    """Where masters, moments and gradients of an engine's parameters live between steps."""

    tier: Tier = Tier.DEVICE
    pinned: bool = True
    """Host memory that the device reads and writes is page-locked."""
    share: float = 1.0
    """Of the elements that live there; the first ones of the model stay on the device."""
    tile: int = 1 << 25
    """Elements that are updated at a time."""
    once: bool = False
    """A gradient comes once a step, as far as the config says."""
    swap: SwapFile | None = None
    """Of the tier DISK."""

    @property
    def away(self) -> bool:
        """True if anything leaves the device."""
        return self.tier is not Tier.DEVICE and self.share > 0


AT_HOME = Homes()
"""Everything lives on the device."""
