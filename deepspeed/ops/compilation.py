"""Triton's compilation of this library's kernels, told while it goes on.

Triton compiles a kernel where it is first used, once for each device and dtype, and keeps it in the user's cache. A
first start waits for several of them; who watches it should see why. A start that finds them all says nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from deepspeed.log import print_dist

__all__ = ["Compilations", "follow_compilation"]

EVERY_S = 1.0
"""So much is compiled before a line tells of it."""


_ONE_AT_A_TIME = threading.Lock()


class Compilations:
    """A listener of Triton's compiler; hands everything on to the one that was there before."""

    def __init__(self, before: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._before, self._clock = before, clock
        self.count = 0
        self.seconds = 0.0
        """In which something was compiled; threads do so side by side."""
        self._until = float("-inf")
        self._told = 0.0
        self._lock = threading.Lock()

    def __call__(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """A kernel is there; told on rank 0 if it is one of this library's that had to be compiled."""
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        home = str(getattr(getattr(src, "fn", None), "__module__", ""))
        if cache_hit or not home.startswith("deepspeed."):
            return
        with self._lock:
            self.count += 1
            now = self._clock()
            self.seconds += max(0.0, now - max(now - times.total / 1e6, self._until))
            self._until = now
            told = self.seconds - self._told >= EVERY_S
            self._told = self.seconds if told else self._told
        if told:
            print_dist(
                f"Triton has compiled {self.count} kernels in {self.seconds:.1f} s, the latest {src.name} of {home}; "
                "later starts find them in its cache",
                ranks=[0],
            )


def follow_compilation() -> None:
    """Tell of what Triton compiles from now on; called where a kernel of its is loaded, by any thread."""
    with _ONE_AT_A_TIME:
        _follow()


@cache
def _follow() -> None:
    from triton import knobs

    knobs.compilation.listener = Compilations(knobs.compilation.listener)
