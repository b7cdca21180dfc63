"""`Schema`: a whole config that is valid; its keys are declared in keys.py, the rules between them in rules.py."""

from __future__ import annotations

from pydantic import ConfigDict, model_validator

from .comm import CommsConfig
from .keys import Keys
from .monitor import DeepSpeedMonitorConfig
from .rules import violations
from .values import raise_together

__all__ = ["Schema"]


class Schema(Keys):
    """Every key of the config, each valid by itself and together with the others."""

    model_config = ConfigDict(defer_build=False)

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        """The four monitors together."""
        return DeepSpeedMonitorConfig(
            tensorboard=self.tensorboard, comet=self.comet, wandb=self.wandb, csv_monitor=self.csv_monitor
        )

    @property
    def comms_config(self) -> CommsConfig:
        """What concerns the recording of communication."""
        return CommsConfig(comms_logger=self.comms_logger)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along the axes of the layout that the config names."""
        return {"sp": self.sequence_parallel_size or 1, "tp": max(1, self.tensor_parallel.autotp_size)}

    @model_validator(mode="after")
    def _rules_between_sections(self) -> Schema:
        raise_together(violations(self))
        return self
