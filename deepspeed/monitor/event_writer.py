"""`EventWriter`: what happens in an engine as records of an `EventFile`; docs/run_page.md has the fields.

[Note: nothing on the way of a step] A step leaves behind device events, copies that are on their way to the host, and
references. It hands them to the writing thread in the next backward, when the reductions that a step does not wait for
(its norm, the loss of a pipeline) are complete. The thread waits for the device, adds up and formats.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from deepspeed.accelerator.clock import CudaEventTimer, HostCopy, mark
from deepspeed.events import (
    CheckpointBegan,
    CheckpointFinished,
    EventStream,
    ExpertsUsed,
    OverflowFound,
    Phase,
    PhaseBegan,
    PhaseFailed,
    PhaseFinished,
    RolloutCompared,
    RunContinued,
    StepFinished,
    Subscription,
)
from deepspeed.log import logger
from deepspeed.monitor.event_file import EventFile, Record

_KINDS_EVERY = 30.0  # seconds: looking at every tensor takes a millisecond
_MEMORY_EVERY = 0.5
_REPEAT = 100  # records after which communication is told again that has not changed
_LONGEST_TEXT = 2000


class OperationSource(Protocol):
    """Where operations of communication are counted."""

    def take(self) -> Callable[[], list[dict[str, Any]]]:
        """What adds up the operations since the last call."""
        ...

    def drop(self) -> None:
        """Forget the operations since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class EventSources:
    """What an engine knows besides its events; each is called only for records that are written."""

    memory: Callable[[], Mapping[str, int]]
    """Bytes of the device, now and at most, and of the host; called by the writing thread."""
    kinds: Callable[[], Mapping[str, int]]
    """Bytes by kind."""
    tokens: Callable[[], int]
    """Tokens that went through this rank's model so far."""
    operations: OperationSource | None = None


@dataclass(slots=True)
class _Step:
    """A step as it is handed to the thread."""

    event: StepFinished
    at: float
    wall_ms: float | None
    tokens: int
    operations: Callable[[], list[dict[str, Any]]] | None
    intervals: list[tuple[Phase, CudaEventTimer]] = field(default_factory=list)
    loss: HostCopy | None = None
    norm: HostCopy | None = None


class EventWriter:
    """Writes every `every`-th step and whatever else happens."""

    def __init__(self, file: EventFile, sources: EventSources, every: int = 1) -> None:
        self._file, self._sources, self._every = file, sources, every
        self._put = file.tell
        self._due = every == 1
        self._began: dict[Phase, Any] = {}
        self._intervals: list[tuple[Phase, CudaEventTimer]] = []
        self._unsent: _Step | None = None
        self._last: tuple[int, float] | None = None
        self._tokens = 0
        self._sums: list[dict[str, Any]] = []
        self._same = 0
        self._kinds_at = self._memory_at = -_KINDS_EVERY
        self._phases: tuple[Subscription, ...] = ()
        self._events: EventStream | None = None
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream) -> EventWriter:
        """Start writing."""
        self._events = events
        told: dict[type, Callable[[Any], None]] = {
            StepFinished: self._step_finished,
            RunContinued: self._run_continued,
            PhaseFailed: self._phase_failed,
            OverflowFound: lambda e: self._put("overflow", step=e.step, before=e.scale_before, after=e.scale_after),
            ExpertsUsed: self._experts_used,
            RolloutCompared: lambda e: self._put("rollout", tokens=e.tokens, mean=e.mean, largest=e.largest),
            CheckpointBegan: lambda e: self._put("checkpoint", step=e.step, state="began", tag=e.tag, folder=e.folder),
            CheckpointFinished: lambda e: self._put(
                "checkpoint", step=e.step, state="finished", tag=e.tag, folder=e.folder, seconds=e.seconds
            ),
        }
        for kind, handler in told.items():
            self._subscriptions.callback(events.subscribe(kind, handler).close)
        warnings = _Warnings(self._put)
        logger.addHandler(warnings)
        self._subscriptions.callback(logger.removeHandler, warnings)
        self._lost = weakref.finalize(self, _abandon, self._file, warnings)  # an engine that ends without a call
        self._lost.atexit = False
        self._listen()
        return self

    def close(self) -> None:
        """Write what is left and stop; the file is closed, too."""
        self._send()
        self._subscriptions.close()
        for subscription in self._phases:
            subscription.close()
        self._phases = ()
        self._put("end")
        self._file.close()
        self._lost.detach()

    # ---- a step

    def _listen(self) -> None:
        """Listen to phases only while a step needs it: there are many in a step."""
        wanted = self._due or self._unsent is not None
        if wanted and not self._phases and self._events is not None:
            began = self._events.subscribe(PhaseBegan, self._phase_began)
            self._phases = (began, self._events.subscribe(PhaseFinished, self._phase_finished))
        elif not wanted and self._phases:
            for subscription in self._phases:
                subscription.close()
            self._phases = ()

    def _phase_began(self, event: PhaseBegan) -> None:
        if self._unsent is not None and event.phase is Phase.BACKWARD:
            self._send()
            self._listen()
        if self._due:
            self._began[event.phase] = mark()

    def _phase_finished(self, event: PhaseFinished) -> None:
        start = self._began.pop(event.phase, None)
        if start is None:
            return
        interval = (event.phase, CudaEventTimer(start, mark()))
        late = event.phase is Phase.STEP and self._unsent is not None  # it ends after the event of its step
        (self._unsent.intervals if late and self._unsent is not None else self._intervals).append(interval)

    def _step_finished(self, event: StepFinished) -> None:
        self._send()
        now, tokens = time.perf_counter(), self._sources.tokens()
        operations = self._sources.operations
        if event.step % self._every == 0:
            wall = None if self._last is None else 1e3 * (now - self._last[1]) / max(event.step - self._last[0], 1)
            taken = None if operations is None or not self._due else operations.take()
            self._unsent = _Step(event, time.time(), wall, tokens - self._tokens, taken, self._intervals)
            self._last, self._intervals = (event.step, now), []
            if now - self._kinds_at > _KINDS_EVERY:
                self._kinds_at = now
                self._put("memory", step=event.step, kinds=dict(self._sources.kinds()))
        elif operations is not None:
            operations.drop()
        self._tokens = tokens
        self._due = (event.step + 1) % self._every == 0
        self._listen()

    def _send(self) -> None:
        step, self._unsent = self._unsent, None
        if step is None:
            return
        loss, norm = step.event.loss, step.event.grad_norm
        step.loss = None if loss is None else HostCopy(loss)
        step.norm = None if norm is None else HostCopy(norm)
        self._file.put(partial(self._record, step))

    def _record(self, step: _Step) -> Record:
        """Called by the writing thread."""
        event, times = step.event, dict.fromkeys((phase.value for phase, _ in step.intervals), 0.0)
        for phase, interval in step.intervals:
            times[phase.value] += interval.get_elapsed_msec()
        record: dict[str, Any] = {
            "kind": "step",
            "t": round(step.at, 3),
            "step": event.step,
            "samples": event.samples,
            "tokens": step.tokens,
            "applied": event.applied,
            "skipped": event.skipped_steps,
            "lr": event.lr[0] if event.lr else None,
            "scale": event.loss_scale,
            "loss": None if step.loss is None else step.loss.read(),
            "norm": None if step.norm is None else step.norm.read(),
            "wall_ms": None if step.wall_ms is None else round(step.wall_ms, 3),
            "ms": {name: round(value, 3) for name, value in times.items()},
        }
        if step.operations is not None:
            sums = step.operations()
            if sums != self._sums or self._same >= _REPEAT:
                record["comm"], self._sums, self._same = sums, sums, -1
            self._same += 1
        if time.monotonic() - self._memory_at > _MEMORY_EVERY:
            self._memory_at = time.monotonic()
            record["memory"] = dict(self._sources.memory())
        return {name: value for name, value in record.items() if value is not None}

    # ---- whatever else

    def _run_continued(self, event: RunContinued) -> None:
        self._send()
        self._last = None
        self._due = (event.step + 1) % self._every == 0
        self._listen()
        self._put("continued", step=event.step)

    def _experts_used(self, event: ExpertsUsed) -> None:
        layers = {
            name: [round(use.entropy, 5), round(use.dropped / max(sum(use.counts), 1), 5), round(max(use.loads), 4)]
            for name, use in event.layers.items()
        }
        self._put("experts", step=event.step, layers=layers)

    def _phase_failed(self, event: PhaseFailed) -> None:
        self._send()
        text = str(event.error)[:_LONGEST_TEXT]
        self._put("error", phase=event.phase.value, type=type(event.error).__name__, text=text)


def _abandon(file: EventFile, warnings: logging.Handler) -> None:
    logger.removeHandler(warnings)
    file.close()


class _Warnings(logging.Handler):
    """Warnings and errors of the library's logger as records; `extra={"event": "hang"}` gives one a kind of its own."""

    def __init__(self, put: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = put

    def emit(self, record: logging.LogRecord) -> None:
        kind = getattr(record, "event", "warning")
        self._tell(kind, level=record.levelname.lower(), text=record.getMessage()[:_LONGEST_TEXT])
