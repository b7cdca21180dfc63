"""Named timers that follow the device, and `WallClock`: how long forward, backward and step take.

Starting and stopping never waits for the device, reading a timer waits for its last event. Lines that a caller asks
for go to standard output, as the library's logger is quiet by default.

[Note: measuring without waiting] At the begin and end of a phase a device event is recorded, which costs
microseconds and stops nothing. The events are read when the optimizer step is over; only that waits for the
device, once per step, and only while `wall_clock_breakdown` is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.clock import CudaEventTimer, mark, times_line
from deepspeed.errors import DeepSpeedError
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished, StepFinished
from deepspeed.log import print_dist

_GB = 1024**3
_UNREAD_LIMIT = 64


class TimerError(DeepSpeedError, RuntimeError, AssertionError):
    """A timer was used in an order that measures nothing."""


class NamedTimer:
    """Adds up intervals; times are in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._start: Any = None
        self._unread: list[CudaEventTimer] = []
        self._total = 0.0

    def start(self) -> None:
        """Begin an interval."""
        if self.started_:
            raise TimerError(f"timer {self.name_!r} is already running; call stop() before start()")
        self._start = mark()
        self.started_ = True

    def stop(self, reset: bool = False) -> None:
        """End the interval; `reset` forgets the earlier ones."""
        if not self.started_:
            raise TimerError(f"timer {self.name_!r} is not running; call start() before stop()")
        if reset:
            self._unread, self._total = [], 0.0
        self.started_ = False
        self.add(CudaEventTimer(self._start, mark()))

    def add(self, interval: CudaEventTimer) -> None:
        """Count an interval that was measured elsewhere."""
        self._unread.append(interval)
        if len(self._unread) >= _UNREAD_LIMIT:
            self._read(wait=False)

    def reset(self) -> None:
        """Forget everything, a running interval too."""
        self.started_, self._start, self._unread, self._total = False, None, [], 0.0

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far; a running timer keeps running."""
        running = self.started_
        if running:
            self.stop()
        self._read(wait=True)
        total = self._total
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def _read(self, *, wait: bool) -> None:
        """Add up the intervals that are over; with `wait` all are waited for."""
        over = [wait or interval.end_event.query() for interval in self._unread]
        pairs = list(zip(self._unread, over, strict=True))
        self._total += sum(interval.get_elapsed_msec() for interval, done in pairs if done)
        self._unread = [interval for interval, done in pairs if not done]


class SynchronizedWallClockTimer:
    """Timers by name, made when first asked for: `timers("fwd").start()`."""

    Timer = NamedTimer

    def __init__(self) -> None:
        self.timers: dict[str, NamedTimer] = {}

    def __call__(self, name: str) -> NamedTimer:
        timer = self.timers.get(name)
        if timer is None:
            timer = self.timers[name] = NamedTimer(name)
        return timer

    def get_timers(self) -> dict[str, NamedTimer]:
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Memory of the device now and at its peak, as a part of a line."""
        device = get_accelerator()
        used = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "mem_reserved": device.memory_reserved(),
            "max_mem_reserved": device.max_memory_reserved(),
        }
        return " | ".join(f"{name}: {size / _GB:.4f} GB" for name, size in used.items())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Write the named timers, each divided by `normalizer`, as one line; default rank 0."""
        if normalizer <= 0.0:
            raise ValueError(f"normalizer is {normalizer}; times are divided by it, so give a number above zero")
        found = {name: self.timers[name].elapsed(reset=reset) / normalizer for name in names if name in self.timers}
        if found:
            line = times_line(found)
            print_dist(f"{line} | {self.memory_usage()}" if memory_breakdown else line, ranks=ranks or [0])


class NoopTimer(SynchronizedWallClockTimer):
    """The same interface where nothing is to be timed: every time is 0."""

    class Timer(NamedTimer):
        """A timer that never runs."""

        def start(self) -> None:
            """Nothing."""

        def stop(self, reset: bool = False) -> None:
            """Nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.timer = self.Timer("off")

    def __call__(self, name: str) -> NamedTimer:
        return self.timer


TIMER_NAMES: Mapping[Phase, str] = {
    Phase.FORWARD: "fwd",
    Phase.BACKWARD: "bwd",
    Phase.BACKWARD_INNER: "bwd_inner",
    Phase.BACKWARD_REDUCE: "bwd_allreduce",
    Phase.STEP: "step",
}

Handler = Callable[[StepFinished, Mapping[Phase, float]], None]


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

    def listen(self, handler: Handler) -> ExitStack:
        """Call `handler` with every step and its milliseconds per phase, until what is returned is closed."""
        self._handlers.append(handler)
        listening = ExitStack()
        listening.callback(self._handlers.remove, handler)
        return listening

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
        """The times are complete once the step phase is over too, whichever of the two events is first."""
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
