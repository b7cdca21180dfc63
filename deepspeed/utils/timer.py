"""Timers for scripts: named ones that follow the device, a throughput timer, and a trimmed mean.

On a device that works behind the host's back an interval is a pair of device events: starting and stopping never
waits, reading a timer waits for its last event. Elsewhere the host's clock is right. Lines that a caller asks for
go to standard output, as the library's logger is quiet by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host import HostEvent, HostMemory
from deepspeed.errors import DeepSpeedError
from deepspeed.log import print_dist

__all__ = [
    "CudaEventTimer",
    "NamedTimer",
    "NoopTimer",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "TimerError",
    "mark",
    "times_line",
    "trim_mean",
]

_GB = 1024**3
_UNREAD_LIMIT = 64


class TimerError(DeepSpeedError, RuntimeError, AssertionError):
    """A timer was used in an order that measures nothing."""


def mark() -> Any:
    """This point of the device's work, as an event with `query`, `synchronize` and `elapsed_time(later)`."""
    accelerator = get_accelerator()
    event = HostEvent() if accelerator.use_host_timers() else accelerator.Event(enable_timing=True)
    event.record()
    return event


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Mean without the smallest and the largest `trim_percent` (a fraction) of the values; 0 for no values."""
    if not 0.0 <= trim_percent <= 1.0:
        raise ValueError(f"trim_percent is {trim_percent}; it is a fraction between 0 and 1, such as 0.1")
    count = len(data)
    if count == 0:
        return 0.0
    cut = min(round(count * trim_percent), (count - 1) // 2)  # the median is always left
    kept = sorted(data)[cut : count - cut]
    return sum(kept) / len(kept)


def times_line(milliseconds: Mapping[str, float]) -> str:
    """`time (ms) | fwd: 1.23 | bwd: 4.56`."""
    return " | ".join(["time (ms)", *(f"{name}: {value:.2f}" for name, value in milliseconds.items())])


class CudaEventTimer:
    """The time between two events of the device, whichever device it is."""

    __slots__ = ("end_event", "start_event")

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event = start_event
        self.end_event = end_event

    def get_elapsed_msec(self) -> float:
        """Milliseconds; waits for the end event."""
        self.end_event.synchronize()
        return float(self.start_event.elapsed_time(self.end_event))


class NamedTimer:
    """Adds up intervals; times are in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._start: Any = None
        self._unread: list[CudaEventTimer] = []
        self._total = 0.0
        self._unread_records: list[CudaEventTimer] = []
        self._records: list[float] = []

    def start(self) -> None:
        """Begin an interval."""
        if self.started_:
            raise TimerError(f"timer {self.name_!r} is already running; call stop() before start()")
        self._start = mark()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the interval; `reset` forgets the earlier ones, `record` keeps this one for `mean()`."""
        if not self.started_:
            raise TimerError(f"timer {self.name_!r} is not running; call start() before stop()")
        if reset:
            self._unread, self._total = [], 0.0
        self.started_ = False
        self.add(CudaEventTimer(self._start, mark()), record=record)

    def add(self, interval: CudaEventTimer, record: bool = False) -> None:
        """Count an interval that was measured elsewhere."""
        self._unread.append(interval)
        if record:
            self._unread_records.append(interval)
        if max(len(self._unread), len(self._unread_records)) >= _UNREAD_LIMIT:
            self._read(wait=False)

    def reset(self) -> None:
        """Forget everything but the records, a running interval too."""
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

    def mean(self) -> float:
        """Mean of the recorded intervals, without the smallest and the largest tenth."""
        self._read(wait=True)
        return trim_mean(self._records, 0.1)

    def forget_records(self) -> None:
        """Start the mean anew."""
        self._unread_records, self._records = [], []

    def _read(self, *, wait: bool) -> None:
        times, self._unread = _split(self._unread, wait=wait)
        self._total += sum(times)
        times, self._unread_records = _split(self._unread_records, wait=wait)
        self._records += times


def _split(intervals: list[CudaEventTimer], *, wait: bool) -> tuple[list[float], list[CudaEventTimer]]:
    """Milliseconds of those that are over, and the others; with `wait` all are waited for."""
    over = [wait or interval.end_event.query() for interval in intervals]
    times = [interval.get_elapsed_msec() for interval, done in zip(intervals, over, strict=True) if done]
    return times, [interval for interval, done in zip(intervals, over, strict=True) if not done]


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
        """All timers by name."""
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
        _check(normalizer)
        found = {name: self.timers[name].elapsed(reset=reset) / normalizer for name in names if name in self.timers}
        line = times_line(found)
        print_dist(f"{line} | {self.memory_usage()}" if memory_breakdown else line, ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean of the recorded intervals of each named timer, divided by `normalizer`; `reset` forgets them."""
        _check(normalizer)
        found = [self.timers[name] for name in names if name in self.timers]
        means = {timer.name_: timer.mean() / normalizer for timer in found}
        if reset:
            for timer in found:
                timer.forget_records()
        return means


def _check(normalizer: float) -> None:
    if normalizer <= 0.0:
        raise ValueError(f"normalizer is {normalizer}; times are divided by it, so give a number above zero")


class NoopTimer:
    """The same interface where nothing is to be timed: every time is 0."""

    class Timer:
        """A timer that never runs."""

        def start(self) -> None:
            """Nothing."""

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def elapsed(self, reset: bool = True) -> float:
            """0."""
            return 0.0

        def mean(self) -> float:
            """0."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """None at all."""
        return {}

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Nothing."""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """None at all."""
        return {}


class ThroughputTimer:
    """Samples per second of a loop that calls `start()` and `stop()` around each micro step.

    The first `start_step` global steps are warm-up. `config` has `enabled` and `synchronized`; synchronized, the
    device is waited for at both ends of every interval. Inside an engine `profiling.Throughput` does this unasked.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: float | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or print_dist
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self.step_elapsed_time = 0.0
        self._started_at: float | None = None
        self.started = False

    @property
    def enabled(self) -> bool:
        """Whether it measures at all."""
        return bool(self.config.enabled)

    def update_epoch_count(self) -> None:
        """A new epoch begins; micro steps count from 0 again."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro step begins."""
        if not self.enabled:
            return
        self.started = True
        self._started_at = self._now() if self.global_step_count >= self.start_step else None

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """The micro step ends, and with `global_step` an optimizer step, after which a line may be written."""
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self._started_at is None:
            return
        duration = self._now() - self._started_at
        self.total_elapsed_time += duration
        self.step_elapsed_time += duration
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._report()
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Samples per second since warm-up ended; minus infinity before there is a measurement."""
        steps = self.global_step_count - self.start_step
        if steps <= 0 or self.total_elapsed_time <= 0.0:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def _report(self) -> None:
        device = get_accelerator()
        where = f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}"
        current = self.batch_size / max(self.step_elapsed_time, 1e-9)
        self.logging(
            f"{where}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={current}, "
            f"MemAllocated={round(device.memory_allocated() / _GB, 2)}GB, "
            f"MaxMemAllocated={round(device.max_memory_allocated() / _GB, 2)}GB"
        )
        if self.monitor_memory:
            host = HostMemory()
            self.logging(f"{where}, vm %: {100 * (1 - host.available() / max(host.total(), 1)):.1f}")
