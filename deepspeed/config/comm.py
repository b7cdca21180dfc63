"""The `comms_logger` section: which collectives are recorded."""

from __future__ import annotations

from pydantic import Field

from .model import DeepSpeedConfigModel, Section
from .values import Names

__all__ = ["CommsConfig", "CommsLoggerConfig"]


class CommsLoggerConfig(Section):
    """Sizes, counts, latency and bandwidth of collectives."""

    enabled: bool = Field(False, description="Whether collectives are recorded; each is then synchronised.")
    prof_all: bool = Field(True, description="Whether every operation is recorded, rather than those of prof_ops.")
    prof_ops: Names = Field([], description="Names of the operations that are recorded when prof_all is false.")
    verbose: bool = Field(False, description="Whether each operation is logged when it happens.")
    debug: bool = Field(False, description="Whether the name of the caller is added to the operation's name.")


class CommsConfig(DeepSpeedConfigModel):
    """Everything in the config that concerns the recording of communication."""

    comms_logger: CommsLoggerConfig = Field(
        default_factory=CommsLoggerConfig, description="Sizes, counts, latency and bandwidth of collectives."
    )

    @property
    def comms_logger_enabled(self) -> bool:
        """Whether collectives are recorded."""
        return self.comms_logger.enabled
