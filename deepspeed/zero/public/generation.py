"""Generate text with a model whose parameters are sharded: all of it whole, without hooks, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from deepspeed.zero.public.gathered import GatheredParameters

__all__ = ["unwrap_model_for_generation"]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The module of an engine, with whole parameters and without hooks, so that every token costs no communication.

    All ranks enter and leave it together. Parameters must not be changed meanwhile.
    """
    parts = getattr(model, "_parts", None)
    sharded = None if parts is None else parts.sharded
    hooks = None if sharded is None else sharded.hooks
    module: nn.Module = model if parts is None else model.module
    if hooks is None or not hooks.handles:
        with GatheredParameters(module.parameters()):
            yield module
        return
    with GatheredParameters(module.parameters()):
        hooks.remove()
        try:
            yield module
        finally:
            hooks.install()
