"""`tp_model_init`: what a script asks for before `deepspeed.initialize` is remembered with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from deepspeed.checkpoint.pretrained import values_from
from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.config.read import RawConfig
from deepspeed.config.schema import Schema
from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.process_groups import ranks_of


@dataclass(frozen=True)
class _Asked:
    size: int
    dtype: torch.dtype | None
    group: Any


_asked: WeakKeyDictionary[nn.Module, _Asked] = WeakKeyDictionary()
_mode = {"training": True}
"""A dict, so that a function can change it without `global`."""


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Say that `model` is to be split over `tp_size` ranks; `deepspeed.initialize` does it. Returns the model as it is.

    `tp_group` names the process group of these ranks. Where the config of `initialize` says something else, that is an
    error there; what it leaves out is taken from here. `config` is read there, too; a dict must not contradict here.
    `checkpoint` is a folder of safetensors: parameters on the meta device get their values from there, and each rank
    reads its own part.
    """
    group, checkpoint = kwargs.pop("tp_group", None), kwargs.pop("checkpoint", None)
    if kwargs:
        raise UsageError(
            f"tp_model_init: unknown arguments {', '.join(sorted(kwargs))}; it takes tp_group and checkpoint"
        )
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise UsageError(f"tp_model_init: tp_size is {tp_size!r}, expected a number of ranks from 1")
    given = (config.get("tensor_parallel") or {}).get("autotp_size") if isinstance(config, Mapping) else None
    if isinstance(given, int) and given > 1 and given != tp_size:
        raise UsageError(
            f"tp_model_init: tp_size is {tp_size}, but tensor_parallel.autotp_size of its config is {given}"
        )
    if group is not None and group.size() != tp_size:
        raise UsageError(f"tp_model_init: tp_size is {tp_size}, but tp_group has {group.size()} ranks; let them agree")
    _asked[model] = _Asked(tp_size, dtype, group)
    if checkpoint is not None:
        values_from(model, checkpoint)
    return model


def set_autotp_mode(training: bool = False) -> None:
    """Remember whether layers are split for training or inference; a split layer serves both and does not ask."""
    _mode["training"] = bool(training)


def is_autotp_training_mode() -> bool:
    """The last value of `set_autotp_mode`; training at first."""
    return _mode["training"]


def with_asked(model: nn.Module, config: RawConfig) -> RawConfig:
    """The config of `initialize`, with the number of ranks of `tp_model_init` where it has none itself."""
    asked = _asked.get(model)
    section = config.values.get("tensor_parallel")
    if asked is None or asked.size < 2:
        return config
    if section is not None and (not isinstance(section, dict) or section.get("autotp_size")):
        return config
    split = {**(section or {}), "autotp_size": asked.size}
    return config._replace(values={**config.values, "tensor_parallel": split})


def asked_size(model: nn.Module, size: int) -> int:
    """The number of ranks by the config, or by `tp_model_init` where the config has none; both must agree."""
    asked = _asked.get(model)
    if asked is None:
        return size
    if size > 1 and asked.size != size:
        raise UsageError(
            f"tensor_parallel.autotp_size is {size}, but tp_model_init was called with tp_size={asked.size}; let "
            "them agree"
        )
    return max(size, asked.size)


def check_asked(model: nn.Module, schema: Schema, axis: AxisGroup, mpu: Any) -> None:
    """Refuse what contradicts: groups beside an mpu, groups of other ranks, another dtype."""
    section: TPTrainingConfig = schema.tensor_parallel
    asked = _asked.get(model)
    group = section.tensor_parallel.tp_group if asked is None or asked.group is None else asked.group
    if section.tensor_parallel.mpu is not None and section.tensor_parallel.mpu is not mpu:
        raise UsageError("tensor_parallel.tp.mpu is not the mpu of deepspeed.initialize; pass it there as mpu=...")
    if group is not None and mpu is not None:
        raise UsageError("a tp_group and an mpu both say which ranks share layers; give one of them")
    if group is not None and tuple(ranks_of(group)) != tuple(axis.ranks):
        raise UsageError(
            f"tp_group holds the ranks {list(ranks_of(group))}, but with {axis.size} tensor-parallel ranks, which are "
            f"neighbours, this one belongs to {list(axis.ranks)}. Make the group of those, or pass an mpu"
        )
    if asked is not None and asked.dtype is not None:
        _check_dtype(asked.dtype, schema)


def _check_dtype(dtype: torch.dtype, schema: Schema) -> None:
    section = schema.tensor_parallel
    given = "dtype" in section.model_fields_set
    found = torch.bfloat16 if schema.bf16.enabled else torch.float16 if schema.fp16.enabled else None
    key = "bf16.enabled" if schema.bf16.enabled else "fp16.enabled"
    if found is None and given:
        found, key = _DTYPES[section.dtype], "tensor_parallel.dtype"
    if found is not None and found != dtype:
        raise UsageError(
            f"tp_model_init was called with dtype={dtype}, but {key} of the config means {found}; let them agree"
        )
