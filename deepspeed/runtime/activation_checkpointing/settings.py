"""The settings of activation checkpointing: their values, where each came from, and which fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.config import DeepSpeedConfig, Schema, load
from deepspeed.config.activation import ActivationCheckpointingConfig
from deepspeed.errors import DeepSpeedConfigError

__all__ = ["ARGUMENTS", "SECTION", "Settings", "given_in", "section_of"]

SECTION = "activation_checkpointing"

# key of the config section → the argument of configure() that overrides it
ARGUMENTS = {
    "partition_activations": "partition_activations",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
_COUNTS = {"number_checkpoints": 1, "keep_last_count": 0}  # the least of each


@dataclass(frozen=True, slots=True)
class Settings:
    """How saved inputs are kept; the fields are the keys of the config section."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    keep_last_count: int = 1

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Checked settings; what is not given has its default."""
        for key, value in values.items():
            least = _COUNTS.get(key)
            if least is not None:
                fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
                expected = f"a whole number from {least} on"
            else:
                fits, expected = isinstance(value, bool), "true or false"
            if not fits:
                raise _error(key, f"found {value!r}, expected {expected}")
        settings = cls(**values)
        if settings.contiguous_memory_optimization:
            for key in ("partition_activations", "number_checkpoints"):
                if not getattr(settings, key):
                    raise _error(
                        "contiguous_memory_optimization",
                        f"one buffer for all saved inputs needs {key} ({ARGUMENTS[key]}=), found "
                        f"{getattr(settings, key)}. Set it, or turn contiguous_memory_optimization off",
                    )
        return settings


def given_in(section: ActivationCheckpointingConfig) -> dict[str, Any]:
    """The keys that the user wrote in the section, with their values; null means not given."""
    keys = (*ARGUMENTS, "keep_last_count")
    values = {key: getattr(section, key) for key in keys if key in section.model_fields_set}
    return {key: value for key, value in values.items() if value is not None}


def section_of(config: Any) -> ActivationCheckpointingConfig:
    """The section of a config in any of its forms: loaded, a dict, a file, base64 text, or the section itself."""
    if isinstance(config, ActivationCheckpointingConfig):
        return config
    if isinstance(config, DeepSpeedConfig):
        return config.schema.activation_checkpointing
    schema = config if isinstance(config, Schema) else load(config, partial=True).schema
    return schema.activation_checkpointing


def _error(key: str, text: str) -> DeepSpeedConfigError:
    path = f"{SECTION}.{key}"
    argument = f" (argument {ARGUMENTS[key]} of configure)" if key in ARGUMENTS else ""
    return DeepSpeedConfigError(f"{path}{argument}: {text}.", path=path)
