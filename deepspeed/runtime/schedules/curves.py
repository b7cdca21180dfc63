"""The curves of the five learning-rate schedules, as pure functions of the step k; nothing here has state.

[Note: the step k]
k is `last_batch_iteration`: −1 when the schedule is built, then 0, 1, 2, … after each optimizer step. The value at
k = −1 therefore governs the first update, the value at k = 0 the second. A curve depends on k alone, so resuming,
jumping and going back are all the same evaluation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WARMUP_LINEAR_RATE", "WARMUP_LOG_RATE", "Cycle", "cosine", "growth", "line", "linear_decay", "warmup"]

WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"


def line(low: float, high: float, share: float) -> float:
    """The point that lies `share` of the way from `low` to `high`."""
    return low + (high - low) * share


def warmup(k: int, steps: int, kind: str) -> float:
    """Share of the way from the minimum to the maximum: 0 up to k = 0, 1 from k = steps on.

    Logarithmic: ln(k + 1) / ln(steps); linear: k / steps.
    """
    if k < 0:
        return 0.0
    if k >= steps:
        return 1.0
    return k / steps if kind == WARMUP_LINEAR_RATE else math.log(k + 1) / math.log(steps)


def linear_decay(k: int, steps: int, total: float) -> float:
    """Share that is left after the warmup: 1 at k = steps, 0 from k = total on."""
    return max(0.0, (total - k) / max(1.0, total - steps))


def cosine(k: int, steps: int, total: float, floor: float) -> float:
    """Half a cosine after the warmup, from just below 1 at k = steps to `floor` from k = total − 1 on."""
    progress = min(1.0, (k - steps + 1) / max(1.0, total - steps))
    return line(floor, 1.0, (1.0 + math.cos(math.pi * progress)) / 2)


def growth(k: int, size: int, rate: float, staircase: bool) -> float:
    """Factor of the range test: 1 at k = −1, and `rate` more for every `size` steps, in jumps if a staircase."""
    position = (k + 1) // size if staircase else (k + 1) / size
    return 1.0 + rate * position


@dataclass(frozen=True, slots=True)
class Cycle:
    """The shape of a 1-cycle schedule: up over `first` steps, down over `second`, then decay."""

    first: float
    second: float
    first_stairs: int
    second_stairs: int
    decay_size: float

    def over(self, k: int) -> bool:
        """True once the cycle has ended and the decay runs."""
        return k >= self.first + self.second

    def height(self, k: int) -> float:
        """0 at the ends of the cycle, 1 at its top; with n stairs only multiples of 1/n, rounded down."""
        at = (k + 1) % (self.first + self.second)
        if at <= self.first:
            return _stair(at, self.first, self.first_stairs)
        return _stair(self.first + self.second - at, self.second, self.second_stairs)

    def decayed(self, k: int, rate: float) -> float:
        """1 plus `rate` for every `decay_size` steps since the cycle ended; 1 where there is no decay."""
        if self.decay_size == 0 or rate == 0:
            return 1.0
        return 1.0 + rate * (k + 1 - self.first - self.second) / self.decay_size


def _stair(done: float, whole: float, stairs: int) -> float:
    return done / whole if stairs <= 0 else (done * stairs // whole) / stairs
