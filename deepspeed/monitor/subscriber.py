"""`MonitorSubscriber`: turns finished steps into metrics, with the number of samples as the x axis."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed.accelerator.clock import HostCopy
from deepspeed.events import EventStream, ExpertsUsed, Phase, RolloutCompared, StepFinished, Subscription
from deepspeed.monitor.monitor import Monitor, writes_here

if TYPE_CHECKING:
    from deepspeed.profiling.timers import WallClock

_PREFIX = "Train/Samples/"
_EXPERTS = "Train/Experts/"
_ROLLOUT = "Train/Rollout/logprob_gap_"


@dataclass(frozen=True, slots=True)
class _PendingMetrics:
    """Metrics of a step whose loss is on its way to the host."""

    metrics: list[tuple[str, Any, int]]
    loss: HostCopy
    samples: int


class MonitorSubscriber:
    """Writes lr, loss scale, loss and times of every step to a monitor, on rank 0.

    It never waits for the device: a loss that is still being computed is copied to the host behind the step's
    work, and the step is written when the copy is there: at once, at the next step, or by `flush()`.
    """

    def __init__(self, monitor: Monitor, *, times: WallClock | None = None) -> None:
        self._monitor = monitor
        self._times = times
        self._unread: _PendingMetrics | None = None
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream) -> MonitorSubscriber:
        """Start listening; on other ranks than 0 nothing listens, so nothing is emitted for it."""
        if writes_here():
            subscription: Subscription = events.subscribe(StepFinished, self._step_finished)
            self._subscriptions.callback(subscription.close)
            self._subscriptions.callback(events.subscribe(ExpertsUsed, self._experts_used).close)
            self._subscriptions.callback(events.subscribe(RolloutCompared, self._rollout_compared).close)
            if self._times is not None:
                self._subscriptions.callback(self._times.listen(self._step_timed).close)
        return self

    def flush(self) -> None:
        """Write what is still on its way from the device."""
        unread, self._unread = self._unread, None
        if unread is not None:
            loss = (_PREFIX + "train_loss", unread.loss.read(), unread.samples)
            self._monitor.write_events([*unread.metrics, loss])

    def close(self) -> None:
        """Write what is left and stop listening; the monitor stays open: its owner closes it."""
        self.flush()
        self._subscriptions.close()

    def _step_finished(self, event: StepFinished) -> None:
        self.flush()
        metrics: list[tuple[str, Any, int]] = []
        if event.lr:
            metrics.append((_PREFIX + "lr", event.lr[0], event.samples))
        if event.loss_scale is not None:
            metrics.append((_PREFIX + "loss_scale", event.loss_scale, event.samples))
        if (loss := event.loss) is None:
            self._monitor.write_events(metrics)
            return
        self._unread = _PendingMetrics(metrics, HostCopy(loss), event.samples)
        if self._unread.loss.arrived:
            self.flush()

    def _experts_used(self, event: ExpertsUsed) -> None:
        self.flush()
        metrics: list[tuple[str, Any, int]] = []
        for layer, use in event.layers.items():
            name, total = f"{_EXPERTS}{layer}/", sum(use.counts)
            metrics.append((f"{name}entropy", use.entropy, event.samples))
            metrics.append((f"{name}dropped", use.dropped / max(total, 1), event.samples))
            metrics += [(f"{name}load/{number}", load, event.samples) for number, load in enumerate(use.loads)]
        self._monitor.write_events(metrics)

    def _rollout_compared(self, event: RolloutCompared) -> None:
        self.flush()
        self._monitor.write_events(
            [(f"{_ROLLOUT}mean", event.mean, event.samples), (f"{_ROLLOUT}max", event.largest, event.samples)]
        )

    def _step_timed(self, event: StepFinished, milliseconds: Mapping[Phase, float]) -> None:
        self.flush()  # steps are written in order: some services drop a step that is older than the last one
        self._monitor.write_events(
            [(f"{_PREFIX}elapsed_time_ms_{phase.value}", time, event.samples) for phase, time in milliseconds.items()]
        )
