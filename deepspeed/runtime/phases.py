"""Telling listeners about the phases of a training step, at no cost when nobody listens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished
from deepspeed.runtime.accumulation import Accumulation

__all__ = ["phase"]

_SILENT: AbstractContextManager[None] = nullcontext()


class _Told:
    __slots__ = ("_events", "_phase", "_place")

    def __init__(self, events: EventStream, phase: Phase, accumulation: Accumulation) -> None:
        self._events = events
        self._phase = phase
        self._place = (accumulation.micro_steps, accumulation.at_boundary)

    def __enter__(self) -> None:
        self._events.emit(PhaseBegan(self._phase, *self._place))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._events.emit(PhaseFinished(self._phase, *self._place))


def phase(events: EventStream, which: Phase, accumulation: Accumulation) -> AbstractContextManager[None]:
    """A `with` block around one phase."""
    if events.wants(PhaseBegan) or events.wants(PhaseFinished):
        return _Told(events, which, accumulation)
    return _SILENT
