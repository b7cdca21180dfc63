"""Telling listeners and torch's profiler about the phases of a training step, at hardly a cost without listeners."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch.autograd import profiler

from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFailed, PhaseFinished
from deepspeed.runtime.accumulation import Accumulation

_SILENT: AbstractContextManager[None] = nullcontext()
_TOLD = (PhaseBegan, PhaseFinished)


class _Watched:
    """A phase with its place among the micro steps; None: only a failure is of interest."""

    __slots__ = ("_events", "_phase", "_place", "_range")

    def __init__(self, events: EventStream, phase: Phase, place: tuple[int, bool] | None) -> None:
        self._events, self._phase, self._place = events, phase, place
        # a range in traces, and with torch.autograd.profiler.emit_nvtx in those of Nsight
        seen = profiler._is_profiler_enabled
        self._range = torch.profiler.record_function(f"deepspeed: {phase.value}") if seen else None

    def __enter__(self) -> None:
        if self._place is not None and self._events.wants(PhaseBegan):
            self._events.emit(PhaseBegan(self._phase, *self._place))
        if self._range is not None:
            self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
        if self._place is not None and self._events.wants(PhaseFinished):
            self._events.emit(PhaseFinished(self._phase, *self._place))
        if error is not None and self._events.wants(PhaseFailed):
            self._events.emit(PhaseFailed(self._phase, error))


def phase(
    events: EventStream, which: Phase, accumulation: Accumulation, ahead: int = 0
) -> AbstractContextManager[None]:
    """A `with` block around one phase, of the micro step that is so many `ahead`."""
    if profiler._is_profiler_enabled or events.wants_any(_TOLD):
        return _Watched(events, which, (accumulation.micro_steps + ahead, accumulation.at_boundary))
    return _Watched(events, which, None) if events.wants(PhaseFailed) else _SILENT
