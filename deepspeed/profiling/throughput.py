"""`Throughput`: samples, tokens and floating-point operations per second."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from deepspeed.accelerator.host import HostEvent
from deepspeed.events import EventStream, PhaseBegan, StepFinished
from deepspeed.utils.timer import CudaEventTimer, NamedTimer, mark

__all__ = ["Throughput", "training_flops_per_token"]

Amount = float | Callable[[], float]


def training_flops_per_token(parameters: int) -> float:
    """The usual estimate for forward and backward of a transformer: 6 per parameter, attention scores left out."""
    return 6.0 * parameters


def _value(amount: Amount) -> float:
    return float(amount() if callable(amount) else amount)


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

    tokens_per_sample: Amount | None
    """Tokens of a sample, or a function that tells; None if samples have no tokens."""
    flops_per_sample: Amount | None
    """Floating-point operations of a sample, forward and backward; None if unknown."""

    def __init__(
        self,
        batch_size: int | Callable[[], int],
        *,
        start_step: int = 2,
        synchronized: bool = True,
        devices: int = 1,
        tokens_per_sample: Amount | None = None,
        flops_per_sample: Amount | None = None,
    ) -> None:
        self.tokens_per_sample = tokens_per_sample
        self.flops_per_sample = flops_per_sample
        self.devices = devices
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

    def attach(self, events: EventStream) -> Throughput:
        """Start measuring."""
        self._subscriptions.callback(events.subscribe(PhaseBegan, self._phase_began).close)
        self._subscriptions.callback(events.subscribe(StepFinished, self._step_finished).close)
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

    @property
    def tokens_per_second(self) -> float | None:
        """Average since warm-up; None where tokens are not known."""
        return self._times(self.samples_per_second, self.tokens_per_sample)

    @property
    def current_tokens_per_second(self) -> float | None:
        """Of the last step; None where tokens are not known."""
        return self._times(self.current_samples_per_second, self.tokens_per_sample)

    @property
    def tflops_per_device(self) -> float | None:
        """Average since warm-up, 10¹² operations per second on each device; None where they are not known."""
        return self._times(self.samples_per_second, self.flops_per_sample, 1e-12 / self.devices)

    @property
    def current_tflops_per_device(self) -> float | None:
        """Of the last step; None where they are not known."""
        return self._times(self.current_samples_per_second, self.flops_per_sample, 1e-12 / self.devices)

    @staticmethod
    def _times(rate: float | None, amount: Amount | None, factor: float = 1.0) -> float | None:
        return None if rate is None or amount is None else rate * _value(amount) * factor

    def _phase_began(self, event: PhaseBegan) -> None:
        if self._began is None:
            self._began = self._mark()

    def _step_finished(self, event: StepFinished) -> None:
        began = self._ended if self._began is None else self._began
        self._began, self._ended = None, self._mark()
        if self._warm_up > 0:
            self._warm_up -= 1
            return
        if began is None:  # attached in the middle of a step
            return
        interval, samples = CudaEventTimer(began, self._ended), _value(self._batch_size)
        self._last = (interval, samples)
        self._time.add(interval)
        self._samples += samples


def _rate(amount: float, milliseconds: float) -> float | None:
    return amount * 1000.0 / milliseconds if milliseconds > 0.0 else None
