"""`TensorBoardMonitor`: event files in `<output_path>/<job_name>`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.base import Backend, Entry, folder_of

if TYPE_CHECKING:
    from deepspeed.config.monitor import TensorBoardConfig

__all__ = ["TensorBoardMonitor"]


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
        self.summary_writer.flush()

    def _close(self) -> None:
        self.summary_writer.close()
