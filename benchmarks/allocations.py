"""Peaks of what torch allocates on the CPU, exact to the byte: from the records of torch's profiler.

The profiler hears of every block that the allocator hands out and takes back, whoever holds it (Python, the graph, a
resized storage), but knows the size only of those that it saw handed out: open it before anything counted is made.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["Allocations"]

_RECORD = "[memory]"  # the profiler's name for a block
_MARK = "mark of allocations: "


class Allocations:
    """Counts while it is open; `span` names a part of the program, whose peaks can be asked for afterwards."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._changes: list[int] = []  # bytes, in time
        self._places: dict[str, int] = {}  # mark → changes before it

    def __enter__(self) -> Allocations:
        gc.collect()  # what is freed while others are counted would be missing from their sum
        self._profile.start()
        # a step may have a million operations, which would take minutes to sort
        torch._C._autograd._enable_record_function(False)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        torch._C._autograd._enable_record_function(True)
        self._profile.stop()
        events: list[Any] = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        for event in sorted(events, key=lambda event: event.start_ns()):
            name = event.name()
            if name == _RECORD:
                self._changes.append(event.nbytes())
            elif name.startswith(_MARK):
                self._places[name.removeprefix(_MARK)] = len(self._changes)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A part of the program; names are used once."""
        self._mark(f"{name} begins")
        yield
        self._mark(f"{name} ends")

    def _mark(self, name: str) -> None:
        torch._C._autograd._enable_record_function(True)
        with record_function(_MARK + name):
            torch._C._autograd._enable_record_function(False)

    def before(self, name: str) -> int:
        """Bytes alive when a span began."""
        return sum(self._changes[: self._places[f"{name} begins"]])

    def peak(self, name: str) -> int:
        """The most bytes alive within a span."""
        alive = highest = self.before(name)
        for change in self._changes[self._places[f"{name} begins"] : self._places[f"{name} ends"]]:
            alive += change
            highest = max(highest, alive)
        return highest
