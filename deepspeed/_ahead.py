"""What `initialize` begins before anything else: loads that take long on a machine's first start and need no Python.

A glance at the config and the model tells whether, and what. It promises nothing: what is wrong in a config is found
when it is read in earnest, and what was not loaded is loaded where it is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.ops.rehearsal import compiles
from deepspeed.ops.triton_loading import load_triton
from deepspeed.ops.vendor_loading import Use, attention, load_vendor, product, product8

__all__ = ["loads_ahead"]

_GLANCE = 2**20  # characters; no config is so long, and what is cut off is not read


@contextmanager
def loads_ahead(model: nn.Module, source: Any) -> Iterator[None]:
    """Load what the model needs beside the body, if the config asks for kernels; then no thread uses the device."""
    config = _glance(source)
    if not (_enabled(config, "fused_kernels") or _enabled(config, "fp8")) or not compiles():
        yield
        return
    load_triton()
    device = _device()
    loading = [] if device is None else [load_vendor(device, _seen(model, config))]
    try:
        yield
    finally:
        wait(loading)


def _glance(source: Any) -> Mapping[str, Any]:
    """A config as it is written; empty where that cannot be seen."""
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):  # nothing that can be read only once
        try:
            with open(source, encoding="utf-8") as file:
                source = json.loads(file.read(_GLANCE))
        except (OSError, ValueError, RecursionError):
            return {}
    return source if isinstance(source, Mapping) else {}


def _enabled(config: Mapping[str, Any], *names: str) -> bool:
    sections = [config.get(name) for name in names]
    return any(isinstance(section, Mapping) and section.get("enabled") is True for section in sections)


def _device() -> torch.device | None:
    """The GPU that this rank is going to use; None where that is not sure before the ranks have met."""
    count, local_rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK", "")
    index = int(local_rank) if local_rank.isdecimal() else 0
    sure = local_rank.isdecimal() or count == 1
    return torch.device("cuda", index) if sure and index < count else None


def _seen(model: nn.Module, config: Mapping[str, Any]) -> list[Use]:
    """What the model uses, as far as it can be looked at: properties of somebody's modules may raise anything."""
    try:
        return _uses(model, config)
    except Exception:  # noqa: BLE001
        return []


def _uses(model: nn.Module, config: Mapping[str, Any]) -> list[Use]:
    """What its first linear layer and its attention compute, in the order of a forward that would wait for them."""
    half = torch.float16 if _enabled(config, "fp16") else torch.float32
    dtype = torch.bfloat16 if _enabled(config, "bf16", "bfloat16") else half
    linear = next((each for each in model.modules() if isinstance(each, nn.Linear)), None)
    shape = None if linear is None else (linear.in_features, linear.out_features)
    heads = next(filter(None, map(_heads, model.modules())), None)
    return [
        *([attention(*heads, dtype)] if heads is not None else []),
        *([product(*shape, dtype)] if shape is not None else []),
        *([product8(*shape, dtype)] if shape is not None and _enabled(config, "fp8") else []),
    ]


def _heads(module: nn.Module) -> tuple[int, int] | None:
    """(number, width) of the heads of a module that lets torch attend: torch's own, and models of Transformers."""
    if isinstance(module, nn.MultiheadAttention):
        return module.num_heads, module.head_dim
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    count, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(count, int) or not isinstance(size, int) or count < 1:
        return None
    width = getattr(config, "head_dim", None)
    return count, width if isinstance(width, int) else size // count
