"""Weights of an engine as whole tensors, some at a time: for an inference engine elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.runtime.parts import Parts
from deepspeed.tensor_parallel import splits_of, whole_of
from deepspeed.transformers.lora import LoraPair, lora_pairs
from deepspeed.zero.interface import GatheredParameters, numel_of, shard_of

_OF_PEFT = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save\.[^.]+")


class WeightBuckets:
    """Yields buckets of weights; all ranks iterate together, to the end."""

    def __init__(self, parts: Parts, limit: int, dtype: torch.dtype | None, *, merge: bool) -> None:
        if not parts.kind.whole or parts.experts is not None:
            raise UsageError(
                "engine.stream_weights() gives whole models; stages of a pipeline, or experts that lie on several "
                "ranks, are joined by engine.zero3_consolidated_16bit_state_dict() or ds_to_universal"
            )
        self._limit, self._dtype, self._axis = limit, dtype, parts.layout.tensor
        self._pairs = {id(pair.weight): pair for pair in lora_pairs(parts.module)} if merge else {}
        self._items = list(self._chosen(parts.module, merge=merge))
        self._splits = splits_of(parts.module) if self._axis.size > 1 else {}

    def _chosen(self, module: nn.Module, *, merge: bool) -> Iterator[tuple[str, str, nn.Parameter]]:
        """(name in the module, published name, parameter): a tied one once."""
        merged = {id(each) for pair in self._pairs.values() for each in pair.adapters}
        active = {id(pair.weight) for pair in self._pairs.values()}
        for name, param in module.named_parameters():
            if id(param) in merged or ".original_module." in name:
                continue
            if merge and "lora_" in name and id(param) not in active and not _is_fused(module, name):
                raise UsageError(
                    f"engine.stream_weights(): {name} belongs to an adapter that cannot be added to a weight. Pass "
                    "merge_lora=False and stream the adapters as they are."
                )
            if not (merge and "lora_" in name):
                yield name, _OF_PEFT.sub("", name) if "lora_" not in name else name, param

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        bucket: dict[str, Tensor] = {}
        size = 0
        for name, published, param in self._items:
            needed = numel_of(param) * (self._dtype or param.dtype).itemsize
            needed *= self._axis.size if name in self._splits else 1
            if bucket and size + needed > self._limit:
                yield bucket
                bucket, size = {}, 0  # the caller's, from now on
            bucket[published] = self._whole(name, param)
            size += needed
        if bucket:
            yield bucket

    @torch.no_grad()
    def _whole(self, name: str, param: nn.Parameter) -> Tensor:
        value = _gathered(param)
        pair = self._pairs.get(id(param))
        if pair is not None:
            value += _delta(pair, value)
        if name in self._splits:
            value = whole_of(value, self._splits[name], self._axis)
        return value if self._dtype is None else value.to(self._dtype)


def _is_fused(module: nn.Module, name: str) -> bool:
    """Whether the layer of an adapter holds it in its weight now."""
    layer = module.get_submodule(re.sub(r"\.lora_.*", "", name))
    return bool(getattr(layer, "merged", False) or getattr(layer, "fuse_lora", False))


def _gathered(param: nn.Parameter) -> Tensor:
    """The whole values of a parameter, in memory of their own; a shard is gathered straight into it."""
    shard = shard_of(param)
    if shard is None or shard.whole or shard.remote is not None:
        with GatheredParameters([param]):
            return param.detach().clone()
    shard.settle()
    flat = shard.data.new_empty(shard.chunk * shard.axis.size)
    with comm.labelled(shard.name):
        comm.all_gather_into_tensor(flat, shard.data, group=shard.axis.group)
    return flat[: shard.numel].view(shard.shape)


def _delta(pair: LoraPair, value: Tensor) -> Tensor:
    with GatheredParameters(pair.adapters):
        return pair.delta().to(value.dtype)
