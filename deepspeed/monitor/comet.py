"""`CometMonitor`: metrics logged to a Comet experiment, each at most once per `samples_log_interval` samples."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.base import Backend, Entry

if TYPE_CHECKING:
    from deepspeed.config.monitor import CometConfig

__all__ = ["CometMonitor"]


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
