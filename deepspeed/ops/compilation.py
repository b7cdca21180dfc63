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

__all__ = ["Compilations", "follow_compilation", "tell_compiled"]

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
        if not cache_hit and home.startswith("deepspeed."):
            self.add(src.name, home, times.total / 1e6)

    def add(self, name: str, home: str, took: float) -> None:
        """Count a kernel of this library that took so many seconds until now, here or in another process."""
        with self._lock:
            self.count += 1
            now = self._clock()
            self.seconds += max(0.0, now - max(now - took, self._until))
            self._until = now
            told = self.seconds - self._told >= EVERY_S
            self._told = self.seconds if told else self._told
        if told:
            print_dist(
                f"Triton has compiled {self.count} kernels in {self.seconds:.1f} s, the latest {name} of {home}; "
                "later starts find them in its cache",
                ranks=[0],
            )


def tell_compiled(kernel: Any, took: float) -> None:
    """Tell of a kernel of this library that another process has compiled for this one."""
    from triton import knobs

    if isinstance(knobs.compilation.listener, Compilations):
        knobs.compilation.listener.add(kernel.__name__, kernel.__module__, took)


def follow_compilation() -> None:
    """Tell of what Triton compiles from now on; called where a kernel of its is loaded, by any thread."""
    with _ONE_AT_A_TIME:
        _follow()


@cache
def _follow() -> None:
    from triton import knobs

    knobs.compilation.listener = Compilations(knobs.compilation.listener)
