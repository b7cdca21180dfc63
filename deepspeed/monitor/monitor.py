"""Monitors: TensorBoard, Weights & Biases, Comet and CSV files, and `MonitorMaster`, all that are enabled as one."""

from __future__ import annotations

import csv
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from deepspeed.accelerator.clock import HostCopy
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.events import EventStream, ExpertsUsed, Phase, RolloutCompared, StepFinished, Subscription
from deepspeed.log import get_dist_msg, logger
from deepspeed.trust import flaw_of_name

if TYPE_CHECKING:
    from deepspeed.config.monitor import CometConfig, CSVConfig, DeepSpeedMonitorConfig, TensorBoardConfig, WandbConfig
    from deepspeed.profiling.timers import WallClock

__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]


class Entry(NamedTuple):
    """One metric as a backend receives it: the value is a number, no longer a tensor."""

    label: str
    value: Any
    step: int


def writes_here() -> bool:
    """True on the one process that writes: rank 0 of the process group, else of the environment, else this one."""
    return get_dist_msg("") is not None


def folder_of(section: str, output_path: str, job_name: str) -> str:
    """`<output_path>/<job_name>`; a name that would lead out of `output_path` is an error on every rank."""
    flaw = flaw_of_name(job_name) if job_name else None
    if flaw is not None:
        raise DeepSpeedConfigError(
            f"{section}.job_name {job_name!r:.200} {flaw}; it names a folder inside {section}.output_path "
            f"({output_path or 'the working directory'}). Give the place itself as output_path.",
            path=f"{section}.job_name",
        )
    if "\0" in output_path:
        raise DeepSpeedConfigError(
            f"{section}.output_path {output_path!r:.200} has a NUL character in it; give the path of a folder",
            path=f"{section}.output_path",
        )
    return os.path.join(output_path, job_name)


class Monitor(ABC):
    """Takes metrics; users may write their own."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write `(label, value, step)` metrics; a value is a number or a tensor of one element."""

    def close(self) -> None:
        """Finish what is being written; nothing is written afterwards."""
        return


class Backend(Monitor):
    """A monitor over a client library: opened on rank 0 only; its failure is logged once and stops nothing.

    A subclass implements `_open`, `_write` and `_close` as if nothing could go wrong.
    """

    key: ClassVar[str]
    """The config section."""
    package: ClassVar[str | None] = None
    """What pip installs; None if nothing is needed."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled: bool = monitor_config.enabled
        self._is_open = False
        self._complained = False
        if self.enabled and writes_here():
            with self._survives("could not be opened, its metrics are not written"):
                self._open()
                self._is_open = True

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        if not self._is_open:
            return
        with self._survives("could not write metrics, some are lost"):
            self._write([Entry(label, _number(value), int(step)) for label, value, step in event_list])

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with self._survives("could not be closed, its last metrics may be lost"):
                self._close()

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _write(self, entries: list[Entry]) -> None:
        """Write the metrics and flush them."""

    @abstractmethod
    def _close(self) -> None: ...

    def _secrets(self) -> tuple[str, ...]:
        """Texts that must not appear in a message."""
        return ()

    @contextmanager
    def _survives(self, what: str) -> Iterator[None]:
        """Around a client library: the first error is logged, none ends the job. Ctrl-C and SystemExit pass."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of a library that training does not need
            self._complain(what, error)

    def _complain(self, what: str, error: Exception) -> None:
        if self._complained:  # a disk may have room again later, so writing is still tried
            return
        self._complained = True
        reason = f"{type(error).__name__}: {error}"
        for secret in self._secrets():
            reason = reason.replace(secret, "***")
        cure = "Repair the cause"
        if isinstance(error, ImportError) and self.package is not None:
            cure = f"Install it with `pip install {self.package}`"
        logger.warning(
            '%s %s (%s). %s, or set "%s": {"enabled": false} in the config. Training goes on.',
            *(self.key, what, reason, cure, self.key),
        )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


class TensorBoardMonitor(Backend):
    """Scalars for TensorBoard, flushed after every call."""

    key = "tensorboard"
    package = "tensorboard"

    def __init__(self, tensorboard_config: TensorBoardConfig) -> None:
        self.output_path = tensorboard_config.output_path
        self.job_name = tensorboard_config.job_name
        self.log_dir = folder_of(self.key, self.output_path, self.job_name)
        self.summary_writer: Any = None
        super().__init__(tensorboard_config)

    def _open(self) -> None:
        library = importlib.import_module("torch.utils.tensorboard")
        self.summary_writer = library.SummaryWriter(log_dir=self.log_dir)

    def _write(self, entries: list[Entry]) -> None:
        for label, value, step in entries:
            self.summary_writer.add_scalar(label, value, step)
        self.flush()

    def _close(self) -> None:
        self.summary_writer.close()

    def get_summary_writer(self, base: str | None = None) -> Any:
        """TensorBoard's writer into `log_dir`; None on ranks that write nothing. `base` has no effect."""
        return self.summary_writer

    def flush(self) -> None:
        """Write what is still in memory."""
        if self.summary_writer is not None:
            self.summary_writer.flush()


class WandbMonitor(Backend):
    """Logs each metric at its step; a run that the script has already started is used, and left open."""

    key = "wandb"
    package = "wandb"

    def __init__(self, wandb_config: WandbConfig) -> None:
        self.group = wandb_config.group
        self.team = wandb_config.team
        self.project = wandb_config.project
        self.run: Any = None
        self._is_ours = False
        super().__init__(wandb_config)

    def _open(self) -> None:
        library = importlib.import_module("wandb")
        self._is_ours = library.run is None
        self.run = library.run
        if self._is_ours:
            self.run = library.init(project=self.project, group=self.group, entity=self.team)

    def _write(self, entries: list[Entry]) -> None:
        for label, value, step in entries:
            self.run.log({label: value}, step=step)

    def _close(self) -> None:
        if self._is_ours:
            self.run.finish()

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Log values of the script's own; nothing on ranks that write nothing."""
        if self._is_open:
            self.run.log(data, step=step, commit=commit)


class CometMonitor(Backend):
    """Thins out each metric on its own: the first value is logged, then the next one an interval or more later."""

    key = "comet"
    package = "comet_ml"

    def __init__(self, comet_config: CometConfig) -> None:
        self.samples_log_interval = comet_config.samples_log_interval
        self.experiment: Any = None
        self._logged_at: dict[str, int] = {}
        super().__init__(comet_config)

    def _open(self) -> None:
        config = self.monitor_config
        self.experiment = importlib.import_module("comet_ml").start(
            api_key=config.api_key,
            project=config.project,
            workspace=config.workspace,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self.experiment.set_name(config.experiment_name)

    def _write(self, entries: list[Entry]) -> None:
        for label, value, step in entries:
            last = self._logged_at.get(label)
            if last is None or step - last >= self.samples_log_interval:
                self._logged_at[label] = step
                self.experiment.log_metric(label, value, step=step)

    def _close(self) -> None:
        self.experiment.end()

    def _secrets(self) -> tuple[str, ...]:
        key = self.monitor_config.api_key
        return (key,) if key else ()


class csvMonitor(Backend):
    """Rows of step and value, appended; `Train/Samples/lr` goes to `Train_Samples_lr.csv` with header `step,lr`.

    The header is written once per file, not once per run: a resumed run leaves no text between the numbers.
    """

    key = "csv_monitor"

    def __init__(self, csv_config: CSVConfig) -> None:
        self.output_path = csv_config.output_path
        self.job_name = csv_config.job_name
        self.log_dir = folder_of(self.key, self.output_path, self.job_name)
        super().__init__(csv_config)

    def _open(self) -> None:
        self.setup_log_dir()

    def setup_log_dir(self, base: str | None = None) -> str:
        """Make the folder of the files; its path. `base` has no effect: the config has the place."""
        os.makedirs(self.log_dir, exist_ok=True)
        return self.log_dir

    def _write(self, entries: list[Entry]) -> None:
        labels = dict.fromkeys(entry.label for entry in entries)
        for label in labels:
            name = label.replace("/", "_").replace(" ", "_") + ".csv"
            with open(os.path.join(self.log_dir, name), "a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(("step", label.rpartition("/")[2]))
                rows.writerows((entry.step, entry.value) for entry in entries if entry.label == label)

    def _close(self) -> None:
        """Every file was closed when it was written."""


class MonitorMaster(Monitor):
    """Hands metrics to the enabled monitors; every rank may call it, rank 0 writes."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config)
        self.enabled: bool = monitor_config.enabled
        parts = monitor_config
        self.tb_monitor = TensorBoardMonitor(parts.tensorboard) if parts.tensorboard.enabled else None
        self.wandb_monitor = WandbMonitor(parts.wandb) if parts.wandb.enabled else None
        self.csv_monitor = csvMonitor(parts.csv_monitor) if parts.csv_monitor.enabled else None
        self.comet_monitor = CometMonitor(parts.comet) if parts.comet.enabled else None
        made: tuple[Backend | None, ...] = (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor)
        self._monitors = tuple(monitor for monitor in made if monitor is not None)

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write `(label, value, step)` metrics to every enabled monitor and flush them."""
        events = list(event_list)
        for monitor in self._monitors:
            monitor.write_events(events)

    def close(self) -> None:
        """Close every monitor; a run that the script itself had started is left open."""
        for monitor in self._monitors:
            monitor.close()


_PREFIX = "Train/Samples/"
_EXPERTS = "Train/Experts/"
_ROLLOUT = "Train/Rollout/logprob_gap_"


class MonitorSubscriber:
    """Writes lr, loss scale, loss and times of every step to a monitor, on rank 0.

    It never waits for the device: a loss that is still being computed is copied to the host behind the step's
    work, and the step is written when the copy is there: at once, at the next step, or by `flush()`.
    """

    def __init__(self, monitor: Monitor, *, times: WallClock | None = None) -> None:
        self._monitor = monitor
        self._times = times
        self._unread: tuple[list[tuple[str, Any, int]], HostCopy, int] | None = None
        """Metrics of a step, its loss on the way to the host, and its samples."""
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
            metrics, loss, samples = unread
            self._monitor.write_events([*metrics, (_PREFIX + "train_loss", loss.read(), samples)])

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
        copy = HostCopy(loss)
        self._unread = metrics, copy, event.samples
        if copy.arrived:
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
