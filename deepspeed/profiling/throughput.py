"""Samples per second: of an engine by itself, or of a script's own loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.clock import CudaEventTimer, mark
from deepspeed.accelerator.host import HostEvent, HostMemory
from deepspeed.events import EventStream, PhaseBegan, StepFinished, Subscription
from deepspeed.log import print_dist
from deepspeed.profiling.timers import NamedTimer

_GB = 1024**3


def _host_mark() -> Any:
    event = HostEvent()
    event.record()
    return event


class Throughput:
    """Rates of the whole job, from its first forward of a step, or from `start()`, to the end of that step.

    A data loader that calls `start()` before it fetches a batch makes loading count; what lies between two steps
    otherwise (evaluation, checkpoints) does not. `synchronized` measures on the device's clock: exact without
    making anything wait until a rate is read. Unsynchronized is the host's clock, which on an asynchronous device
    is right only in the average. The first `start_step` steps are warm-up.
    """

    def __init__(self, batch_size: int | Callable[[], int], *, start_step: int = 2, synchronized: bool = True) -> None:
        self.epoch_count = 0
        self._batch_size = batch_size
        self._mark = mark if synchronized else _host_mark
        self._warm_up = start_step
        self._began: Any = None
        self._ended: Any = None
        self._last: tuple[CudaEventTimer, float] | None = None
        self._time = NamedTimer("steps")
        self._samples = 0.0
        self._subscriptions = ExitStack()
        self._events: EventStream | None = None
        self._waiting: Subscription | None = None

    def attach(self, events: EventStream) -> Throughput:
        """Start measuring."""
        self._events = events
        self._subscriptions.callback(events.subscribe(StepFinished, self._step_finished).close)
        self._subscriptions.callback(self._stop_waiting)
        self._wait_for_phase()
        return self

    def close(self) -> None:
        """Stop measuring; the rates can still be read."""
        self._subscriptions.close()

    def start(self) -> None:
        """The next step begins here, unless it has already begun."""
        if self._began is None:
            self._began = self._mark()

    def update_epoch_count(self) -> None:
        """A data loader begins a new epoch."""
        self.epoch_count += 1

    @property
    def samples_per_second(self) -> float | None:
        """Average since warm-up; None before there is a measurement."""
        return _rate(self._samples, self._time.elapsed(reset=False))

    @property
    def current_samples_per_second(self) -> float | None:
        """Of the last step after warm-up; None before there is a measurement."""
        return None if self._last is None else _rate(self._last[1], self._last[0].get_elapsed_msec())

    def _wait_for_phase(self) -> None:
        """Listen for the first phase of a step, and to no other: there are many in a step."""
        if self._waiting is None and self._events is not None:
            self._waiting = self._events.subscribe(PhaseBegan, self._phase_began)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def _phase_began(self, event: PhaseBegan) -> None:
        self.start()
        self._stop_waiting()

    def _step_finished(self, event: StepFinished) -> None:
        began = self._ended if self._began is None else self._began
        self._began, self._ended = None, self._mark()
        self._wait_for_phase()
        if self._warm_up > 0:
            self._warm_up -= 1
            return
        if began is None:  # attached in the middle of a step
            return
        interval = CudaEventTimer(began, self._ended)
        samples = float(self._batch_size() if callable(self._batch_size) else self._batch_size)
        self._last = (interval, samples)
        self._time.add(interval)
        self._samples += samples


def _rate(amount: float, milliseconds: float) -> float | None:
    return amount * 1000.0 / milliseconds if milliseconds > 0.0 else None


class ThroughputTimer:
    """Samples per second of a loop that calls `start()` and `stop()` around each micro step.

    The first `start_step` global steps are warm-up. `config` has `enabled` and `synchronized`; synchronized, the
    device is waited for at both ends of every interval. Inside an engine `Throughput` does this unasked.
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

    def update_epoch_count(self) -> None:
        """A new epoch begins; micro steps count from 0 again."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro step begins."""
        if not self.config.enabled:
            return
        self.started = True
        self._started_at = self._now() if self.global_step_count >= self.start_step else None

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """The micro step ends, and with `global_step` an optimizer step, after which a line may be written."""
        if not self.config.enabled or not self.started:
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
