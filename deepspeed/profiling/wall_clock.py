"""`WallClock`: how long forward, backward and step take, measured without making the device wait.

[Note: measuring without waiting] At the begin and end of a phase a device event is recorded, which costs
microseconds and stops nothing. The events are read when the optimizer step is over; only that waits for the
device, once per step, and only while `wall_clock_breakdown` is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from deepspeed.accelerator.clock import CudaEventTimer, mark, times_line
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished, StepFinished
from deepspeed.log import print_dist
from deepspeed.profiling.timers import NamedTimer, SynchronizedWallClockTimer

__all__ = ["TIMER_NAMES", "Listening", "WallClock"]

TIMER_NAMES: Mapping[Phase, str] = {
    Phase.FORWARD: "fwd",
    Phase.BACKWARD: "bwd",
    Phase.BACKWARD_INNER: "bwd_inner",
    Phase.BACKWARD_REDUCE: "bwd_allreduce",
    Phase.STEP: "step",
}

Handler = Callable[[StepFinished, Mapping[Phase, float]], None]


class Listening:
    """A handler that is called with the times of every step until `close()`."""

    __slots__ = ("_handler", "_handlers")

    def __init__(self, handlers: list[Handler], handler: Handler) -> None:
        self._handlers = handlers
        self._handler = handler
        handlers.append(handler)

    def close(self) -> None:
        """Stop calling it; closing twice is harmless."""
        if self._handler in self._handlers:
            self._handlers.remove(self._handler)


class WallClock:
    """Times the phases of each step and, with `log`, writes them on rank 0: a line per micro step, one for all.

    `timers` holds the last step under the names `fwd`, `bwd`, `bwd_inner`, `bwd_allreduce` and `step`, and its
    last micro step under the same names with `_microstep`.
    """

    def __init__(self, *, log: bool = True) -> None:
        self.timers = SynchronizedWallClockTimer()
        self._log = log
        self._began: dict[Phase, Any] = {}
        self._micro_steps: dict[int, dict[Phase, NamedTimer]] = {}
        self._unreported: StepFinished | None = None
        self._handlers: list[Handler] = []
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream) -> WallClock:
        """Start measuring."""
        for subscription in (
            events.subscribe(PhaseBegan, self._phase_began),
            events.subscribe(PhaseFinished, self._phase_finished),
            events.subscribe(StepFinished, self._step_finished),
        ):
            self._subscriptions.callback(subscription.close)
        return self

    def listen(self, handler: Handler) -> Listening:
        """Call `handler` with every step and its milliseconds per phase."""
        return Listening(self._handlers, handler)

    def close(self) -> None:
        """Stop measuring; what was measured can still be read."""
        self._subscriptions.close()
        self._began.clear()

    def _phase_began(self, event: PhaseBegan) -> None:
        if not self._micro_steps:  # the first phase of a step: the timers still hold the last one
            for timer in self.timers.get_timers().values():
                timer.reset()
        self._began[event.phase] = mark()

    def _phase_finished(self, event: PhaseFinished) -> None:
        start = self._began.pop(event.phase, None)
        if start is None:  # attached in the middle of a phase
            return
        interval, name = CudaEventTimer(start, mark()), TIMER_NAMES[event.phase]
        phases = self._micro_steps.setdefault(event.micro_step, {})
        if event.phase not in phases:
            phases[event.phase] = NamedTimer(name)
            self.timers(f"{name}_microstep").reset()
        for timer in (phases[event.phase], self.timers(name), self.timers(f"{name}_microstep")):
            timer.add(interval)
        if event.phase is Phase.STEP and self._unreported is not None:
            self._report(self._unreported)

    def _step_finished(self, event: StepFinished) -> None:
        """The times are complete once the step phase is over too, whichever of the two is told first."""
        if Phase.STEP in self._began:
            self._unreported = event
        else:
            self._report(event)

    def _report(self, event: StepFinished) -> None:
        micro_steps, self._micro_steps, self._unreported = self._micro_steps, {}, None
        if self._log:
            for number in sorted(micro_steps):
                phases = micro_steps[number]
                found = {
                    f"{TIMER_NAMES[phase]}_microstep": phases[phase].elapsed() for phase in Phase if phase in phases
                }
                print_dist(times_line(found))
        total = {phase: self.timers(name).elapsed(reset=False) for phase, name in TIMER_NAMES.items()}
        if self._log:
            print_dist(times_line({TIMER_NAMES[phase]: value for phase, value in total.items()}))
        for handler in tuple(self._handlers):
            handler(event, total)
