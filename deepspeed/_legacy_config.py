"""Older questions about a config: constants, and functions that read one key of a dict; the schema answers them.

Reached through the old paths only; new code loads the config and reads its fields.
"""

from __future__ import annotations

from typing import Any

from deepspeed.config.load import load
from deepspeed.config.monitor import DeepSpeedMonitorConfig
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.config.precision import DeepSpeedBF16Config
from deepspeed.config.schema import Schema

__all__ = [
    "ADAM_OPTIMIZER",
    "GRADIENT_CLIPPING_DEFAULT",
    "LOG_LEVEL_DEFAULT",
    "get_bfloat16_config",
    "get_gradient_clipping",
    "get_log_level",
    "get_monitor_config",
    "get_tensor_parallel_config",
]

ADAM_OPTIMIZER = "adam"
GRADIENT_CLIPPING_DEFAULT: float = Schema.model_fields["gradient_clipping"].default
LOG_LEVEL_DEFAULT: str | None = Schema.model_fields["log_level"].default


def _schema(param_dict: dict[str, Any]) -> Schema:
    """The whole dict, checked; it may be incomplete, and may still hold "auto"."""
    return load(param_dict, partial=True).schema


def get_gradient_clipping(param_dict: dict[str, Any]) -> float:
    """The largest norm that gradients may have; 0 is no clipping."""
    return _schema(param_dict).gradient_clipping


def get_log_level(param_dict: dict[str, Any]) -> str | None:
    """The level that the config asks for, or None."""
    return _schema(param_dict).log_level


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """The section `bf16`, or its older spelling `bfloat16`."""
    return _schema(param_dict).bf16


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of the four monitors."""
    schema = _schema(param_dict)
    return DeepSpeedMonitorConfig(
        tensorboard=schema.tensorboard, comet=schema.comet, wandb=schema.wandb, csv_monitor=schema.csv_monitor
    )


def get_tensor_parallel_config(ds_config: dict[str, Any]) -> TPTrainingConfig:
    """The section `tensor_parallel`."""
    return _schema(ds_config).tensor_parallel
