"""`MonitorMaster`: every monitor that the config enables, as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.base import Backend, Monitor
from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor

if TYPE_CHECKING:
    from deepspeed.config.monitor import DeepSpeedMonitorConfig

__all__ = ["Monitor", "MonitorMaster"]


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
