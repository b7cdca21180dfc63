"""Turn a model's parameters into shards, and decide which of them stay whole all the same."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from torch import nn

from deepspeed.parallel import AxisGroup
from deepspeed.zero.param import Shard, ZeroParameter, shard_of

__all__ = ["numel_of", "persist", "shard_module", "shard_parameter"]


def shard_parameter(param: nn.Parameter, axis: AxisGroup, name: str = "") -> Shard:
    """Cut a whole parameter; it stays the same object, and whole until it is released."""
    shard = Shard(param, axis, name)
    param.__class__ = _sharded(type(param))
    param._zero = shard  # type: ignore[attr-defined]
    return shard


def shard_module(module: nn.Module, axis: AxisGroup) -> list[Shard]:
    """Cut every parameter that is not cut yet; returns all shards in the order of the model."""
    shards = []
    for name, param in module.named_parameters():
        shard = shard_of(param)
        if shard is None:
            shard = shard_parameter(param, axis, name)
            if shard.numel:
                shard.release()
        shard.name = name
        shards.append(shard)
    return shards


def persist(shards: Iterable[Shard], threshold: int, total: int) -> list[Shard]:
    """Keep parameters of at most `threshold` elements whole, together at most `total`; returns those that are not."""
    missing, kept = [], 0
    for shard in shards:
        if shard.numel <= threshold and kept + shard.numel <= total:
            kept += shard.numel
            shard.persistent = True
            if not shard.whole:
                missing.append(shard)
    return missing


def numel_of(param: nn.Parameter) -> int:
    """The elements of the whole parameter."""
    shard = shard_of(param)
    return param.numel() if shard is None else shard.numel


@cache
def _sharded(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a sharded parameter that was of this kind."""
    if issubclass(kind, ZeroParameter):
        return kind
    if kind is nn.Parameter:
        return ZeroParameter
    return type(f"Zero{kind.__name__}", (ZeroParameter, kind), {})
