"""`WandbMonitor`: metrics logged to a Weights & Biases run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.base import Backend, Entry

if TYPE_CHECKING:
    from deepspeed.config.monitor import WandbConfig

__all__ = ["WandbMonitor"]


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
