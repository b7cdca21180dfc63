"""The JSON config: one schema, one loader, one error type."""

from __future__ import annotations

from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.load import Loaded, load
from deepspeed.config.model import ConfigModel
from deepspeed.config.schema import Schema
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError

__all__ = [
    "BatchSizeError",
    "ConfigModel",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "Loaded",
    "Schema",
    "load",
]
