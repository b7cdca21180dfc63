"""Adapters in the files of PEFT: `adapter_model.safetensors` and `adapter_config.json`, written and read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.checkpoint.formats.safetensors import TensorFile, open_file, save
from deepspeed.checkpoint.storage.durable import write_file
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.fragments import DimSplit
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear
from deepspeed.parallel.regions import RankGroup, cut_of, whole_of
from deepspeed.transformers.replacement import whole_shape
from deepspeed.trust import read_regular

__all__ = ["load_adapters", "save_adapters"]

_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LONGEST = 1 << 20  # bytes of a config
_VARIANTS = ("fan_in_fan_out", "lora_bias", "alora_invocation_tokens", "layer_replication")
_HALVES = (("lora_A", "lora_weight_1"), ("lora_B", "lora_weight_2"))


def _layers(model: nn.Module, caller: str) -> dict[str, LoRAOptimizedLinear]:
    stages = getattr(model, "num_stages", 1)
    if callable(getattr(model, "mpu", None)) and stages > 1:
        raise UsageError(
            f"{caller}: each of {stages} pipeline stages has the adapters of its own layers alone, and files of PEFT "
            "have those of a whole model; use engine.save_checkpoint and load_checkpoint"
        )
    found = {
        name: each for name, each in model.named_modules() if isinstance(each, LoRAOptimizedLinear) and each.initialized
    }
    if not found:
        raise UsageError(f"{caller}: the model has no layer with adapters; call init_lora(model) first")
    return found


def _key(name: str, half: str) -> str:
    return f"base_model.model.{name}.{half}.weight"


def save_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the adapters of a model, such as `engine.module`; all ranks call it together, and rank 0 writes."""
    layers = _layers(model, "save_adapters")
    tensors = {
        _key(name, half): _whole(getattr(layer, ours)) for name, layer in layers.items() for half, ours in _HALVES
    }
    if not comm.is_initialized() or comm.get_rank() == 0:
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_described(model, layers), indent=2, sort_keys=True).encode()
        content = TensorFile(tensors, {"format": "pt"})
        write_file(target / _TENSORS, lambda stream: save(content, stream))  # type: ignore[arg-type]
        write_file(target / _CONFIG, lambda stream: stream.write(text))
    if comm.is_initialized():
        comm.barrier()


def _cut(adapter: nn.Module) -> tuple[DimSplit, RankGroup] | None:
    """How the weight of an adapter is split over tensor-parallel ranks."""
    share = cut_of(adapter)
    return None if share is None or "weight" not in share.splits else (share.splits["weight"], share.axis)


@torch.no_grad()
def _whole(adapter: Any) -> Tensor:
    """The whole weight of an adapter, of one in shards too, which is gathered by its own methods."""
    param, cut = adapter.weight, _cut(adapter)
    gathers = param.numel() == 0 and getattr(param, "ds_numel", 0) > 0
    if gathers:
        param.all_gather()
    value: Tensor = param.data.detach() if cut is None else whole_of(param.data, *cut)
    value = value.cpu().clone()
    if gathers:
        param.partition()
    return value


def _described(model: nn.Module, layers: Mapping[str, LoRAOptimizedLinear]) -> dict[str, Any]:
    """The config by which PEFT finds the layers."""
    configs = {name: layer.lora_config for name, layer in layers.items()}
    first = next(iter(configs.values()))
    endings = {name.rpartition(".")[2] for name in layers}
    others = [name for name, _ in model.named_modules() if name not in layers and name.rpartition(".")[2] in endings]
    base = getattr(getattr(model, "config", None), "_name_or_path", None)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base or None,
        "target_modules": sorted(layers if others else endings),
        "r": first.lora_r,
        "lora_alpha": first.lora_alpha,
        "rank_pattern": {name: each.lora_r for name, each in configs.items() if each.lora_r != first.lora_r},
        "alpha_pattern": {
            name: each.lora_alpha for name, each in configs.items() if each.lora_alpha != first.lora_alpha
        },
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
    }


def load_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Give a model the adapters of a folder that this library or PEFT wrote; every rank reads it."""
    layers = _layers(model, "load_adapters")
    path = Path(folder)
    try:
        config = json.loads(read_regular(path / _CONFIG, _LONGEST))
        content = open_file(path / _TENSORS)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"load_adapters: {path} has no adapter in the format of PEFT ({error})") from error
    _require_plain(config, path)
    wanted = {
        _key(name, half): (f"{name}.{ours}", _shape(getattr(layer, ours)))
        for name, layer in layers.items()
        for half, ours in _HALVES
    }
    problems = [
        f"{key} is not in the {'file' if key in wanted else 'model'}" for key in sorted(wanted.keys() ^ content.tensors)
    ] + [
        f"{key} has the shape {tuple(content.tensors[key].shape)} there and {shape} in the model"
        for key, (_, shape) in wanted.items()
        if key in content.tensors and tuple(content.tensors[key].shape) != shape
    ]
    alphas = config.get("alpha_pattern") or {}
    for name, layer in layers.items():
        own = (value for key, value in alphas.items() if f".{name}".endswith(f".{key}"))
        alpha = next(own, config.get("lora_alpha"))
        if alpha != layer.lora_config.lora_alpha:
            problems.append(f"{name} has lora_alpha {alpha} there and {layer.lora_config.lora_alpha} in the model")
    problems += [
        f"alpha_pattern has {key!r}, with which no name of a layer ends (regular expressions are not read)"
        for key in alphas
        if not any(f".{name}".endswith(f".{key}") for name in layers)
    ]
    if problems:
        raise CheckpointError(
            f"load_adapters: {path} does not fit the model; {'; '.join(problems[:4])}"
            f"{f'; and {len(problems) - 4} more' * (len(problems) > 4)}. Build the model with the adapter's LoRAConfig"
        )
    values = {}
    for key, (ours, _) in wanted.items():
        cut, value = _cut(model.get_submodule(ours)), content.tensors[key]
        values[f"{ours}.weight"] = value if cut is None else cut[0].cut(value, cut[1].rank)
    model.load_state_dict(values, strict=False)


def _shape(adapter: Any) -> tuple[int, ...]:
    """Of the whole weight of an adapter."""
    cut, shape = _cut(adapter), whole_shape(adapter.weight)
    return shape if cut is None else cut[0].whole_shape(shape)


def _require_plain(config: Any, path: Path) -> None:
    """Refuse adapters that compute otherwise."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"load_adapters: {path / _CONFIG} is not of peft_type LORA")
    other = [key for key, value in config.items() if value and _computes_otherwise(key)]
    if other or config.get("bias", "none") != "none":
        raise CheckpointError(
            f"load_adapters: {path / _CONFIG} asks for {', '.join(other) or 'bias'}, which these layers do not "
            "compute; load it with PEFT"
        )
    begin = config.get("init_lora_weights", True)
    if isinstance(begin, str) and begin.lower() not in ("gaussian", "eva", "orthogonal"):
        raise CheckpointError(
            f"load_adapters: {path / _CONFIG} has init_lora_weights {begin!r}, by which PEFT changes the frozen "
            "weights, too, and the model here has others. Save it by save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...) of PEFT, or load it with PEFT"
        )


def _computes_otherwise(key: str) -> bool:
    """Whether a key of PEFT's config, where it is set, is a variant of LoRA."""
    config = key.endswith("_config") and key not in ("eva_config", "loftq_config", "megatron_config", "runtime_config")
    return config or key.startswith("use_") or key in _VARIANTS
