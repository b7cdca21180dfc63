"""The functions by which schedulers and scripts ask for elastic batch sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from deepspeed.config.elasticity import PLANNED, check_planned, elastic_batch, elastic_section, largest_micro
from deepspeed.errors import ElasticityConfigError, ElasticityError
from deepspeed.log import logger

_FIRST_VERSION = (0, 3, 8)  # that knows elasticity


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a config asks for elastic batch sizes."""
    section = ds_config.get("elasticity")
    return isinstance(section, Mapping) and bool(section.get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """End if the section is not the one that the scheduler planned with; only warns where no scheduler did."""
    text = os.environ.get(PLANNED)
    if text is None:
        logger.warning("%s is not set: nobody planned with this elasticity section", PLANNED)
        return
    check_planned(elastic_section(runtime_elastic_config_dict), text)


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Batch size and valid numbers of GPUs; with a world size or `return_microbatch`, the micro-batch size too."""
    if not isinstance(ds_config, Mapping) or "elasticity" not in ds_config:
        raise ElasticityConfigError("the config has no elasticity section; add one", path="elasticity")
    section = elastic_section(ds_config["elasticity"])
    if not section.enabled:
        raise ElasticityConfigError("elasticity.enabled is false; set it to true", path="elasticity.enabled")
    _check_version(target_deepspeed_version)
    if world_size < 0:
        raise ElasticityConfigError(f"the world size is {world_size}; give a number of GPUs from 1 on, or 0 for none")
    gpus = world_size or _world_of_environment()
    if not gpus and (section.version >= 0.2 or return_microbatch):
        raise ElasticityConfigError(
            "elasticity of version 0.2, and a micro-batch size, are for a number of GPUs: give world_size, or set "
            "WORLD_SIZE",
            path="elasticity.version",
        )
    batch = elastic_batch(section, gpus or None)
    if world_size > 0 or return_microbatch:
        micro = largest_micro(batch, section.micro_batch_sizes, world_size or gpus)
        return batch.train, list(batch.valid), micro
    return batch.train, list(batch.valid)


def _world_of_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _check_version(text: str) -> None:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise ElasticityError(f"{text!r} is not a version of DeepSpeed; give one such as 0.19.6")
    if tuple(int(part or 0) for part in found.groups()) < _FIRST_VERSION:
        raise ElasticityError(f"DeepSpeed {text} has no elasticity; it begins with 0.3.8")
