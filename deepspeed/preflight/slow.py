"""Who is slower than the rest: pure arithmetic over one speed per rank or per group."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TypeVar

from deepspeed.preflight.finding import Level

__all__ = ["MUCH_SLOWER", "SLOWER", "level_of", "stragglers"]

SLOWER = 0.5
"""Below this part of the median a rank is told."""
MUCH_SLOWER = 0.1
"""Below this part it is a problem: a job is as fast as its slowest rank."""

K = TypeVar("K")


def stragglers(speeds: Mapping[K, float]) -> dict[K, float]:
    """Those below half of the median, with their part of it, the slowest first."""
    if not speeds:
        return {}
    middle = median(speeds.values())
    if len(speeds) == 2:
        middle = max(speeds.values())  # of two, only the faster one can say what is usual
    if middle <= 0:
        return {}
    parts = {key: speed / middle for key, speed in speeds.items()}
    slow = {key: part for key, part in parts.items() if part < SLOWER}
    return dict(sorted(slow.items(), key=lambda each: each[1]))


def level_of(parts: Mapping[K, float]) -> Level:
    """How bad it is to have these."""
    if not parts:
        return Level.OK
    return Level.PROBLEM if min(parts.values()) < MUCH_SLOWER else Level.WARNING
