"""The model's state dict, whole: collected module by module from shards, loaded into them, written as one model."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.checkpoint.formats.consolidate import plan_shards
from deepspeed.checkpoint.formats.safetensors import TensorFile, chunks
from deepspeed.checkpoint.formats.safetensors import size as safetensors_size
from deepspeed.checkpoint.storage.durable import sync_directory, write_file, write_tensorfile
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.moe.placement import SpreadExperts, join_layer
from deepspeed.runtime.parts import Parts
from deepspeed.tensor_parallel import splits_of, whole_of, whole_parameters
from deepspeed.transformers.lora import lora_pairs
from deepspeed.zero.interface import GatheredParameters, Shard, numel_of, shard_of, shards_of
from deepspeed.zero.interface import gather as fetch

# ---- reading


def collect(module: nn.Module, *, keep: bool = True, exclude_frozen: bool = False) -> OrderedDict[str, Any] | None:
    """Host copies of everything in the module's state dict; where `keep` is false this rank only helps to gather.

    At most one module's own parameters are whole at a time. A tied parameter is one tensor under all of its names.
    """
    found = _Collected(keep, exclude_frozen)
    with torch.no_grad():
        found.add(module, "")
    return found.values if keep else None


def join_slices(state: OrderedDict[str, Any], experts: SpreadExperts) -> None:
    """Put stacked experts together on every rank, all of which call this."""
    for layer in experts.layers:
        if layer.stacked:
            join_layer(state, experts, layer)


def gather_experts(state: OrderedDict[str, Any], experts: SpreadExperts, *, keep: bool) -> None:
    """Bring what other ranks have of the experts to rank 0, by their names in the whole model; layer by layer."""
    for layer in experts.layers:
        own = {experts.name_of(name): state.pop(name) for name in list(state) if layer.holds(name)}
        axis = layer.groups.ep
        if axis.size > 1 and layer.groups.edp.rank == 0:
            told: list[Any] = [None] * axis.size
            comm.all_gather_object(told, own, group=axis.group)
            joined = {name: torch.cat([each[name] for each in told]) for name in own} if layer.stacked else {}
            own = joined or {name: value for each in told for name, value in each.items()}
        if keep:
            state.update(own)


class _Collected:
    def __init__(self, keep: bool, exclude_frozen: bool) -> None:
        self.values: OrderedDict[str, Any] = OrderedDict()
        self.values._metadata = OrderedDict()  # type: ignore[attr-defined]  # as torch's own state dicts have it
        self._keep = keep
        self._exclude_frozen = exclude_frozen
        self._seen: set[int] = set()
        self._copies: dict[int, Tensor] = {}
        self._whole: dict[int, Tensor] = {}
        """Of the module at hand: its parameters that ranks share, put together."""

    def add(self, module: nn.Module, prefix: str) -> None:
        new = [s for s in shards_of(module.parameters(recurse=False)) if id(s) not in self._seen]
        self._seen.update(map(id, new))
        missing = [shard for shard in new if shard.numel and not shard.whole and self._wanted(shard.param)]
        fetch.gather(missing)
        self._whole = whole_parameters(module)
        metadata = {"version": module._version}
        self.values._metadata[prefix[:-1]] = metadata  # type: ignore[attr-defined]
        if self._keep:
            own: dict[str, Any] = {}
            module._save_to_state_dict(own, prefix, True)
            self.values.update({name: self._copy(v) for name, v in own.items() if self._wanted(v)})
        fetch.release(missing)
        for name, child in module._modules.items():
            if child is not None:
                self.add(child, f"{prefix}{name}.")
        for hook in module._state_dict_hooks.values() if self._keep else ():
            hook(module, self.values, prefix, metadata)

    def _wanted(self, value: Any) -> bool:
        return not (self._exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, nn.Parameter):
            return value.detach().to("cpu", copy=True)
        if id(value) not in self._copies:
            self._copies[id(value)] = self._whole.get(id(value), value.detach()).to("cpu", copy=True)
        return self._copies[id(value)]


# ---- loading


def load(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool,
    from_first: bool,
    only: Collection[nn.Parameter] | None,
    allowed_missing: Collection[str],
) -> None:
    """Put a whole state dict into the module; sharded parameters module by module.

    `from_first`: rank 0's values are given to all; otherwise each rank cuts its shards from its own `state`. `only`:
    the sharded parameters that are loaded; None for all.
    """
    if not shards_of(module.parameters()):
        result = module.load_state_dict(state, strict=False)
        _refuse(strict, result.missing_keys, result.unexpected_keys, [], allowed_missing)
        return
    loading = _Loading(dict(state), from_first, None if only is None else set(map(id, only)))
    with torch.no_grad():
        loading.into(module, "")
    missing, unexpected, errors = loading.missing, loading.unexpected, loading.errors
    if from_first:
        said = [missing, unexpected, errors]
        comm.broadcast_object_list(said, src=0)
        missing, unexpected, errors = said
    _refuse(strict, missing, unexpected, errors, allowed_missing)


class _Loading:
    def __init__(self, state: dict[str, Any], from_first: bool, only: set[int] | None) -> None:
        self._state = state
        self._from_first = from_first
        self._only = only
        self._writes = not from_first or comm.get_rank() == 0
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []

    def into(self, module: nn.Module, prefix: str) -> None:
        shards = shards_of(module.parameters(recurse=False))
        chosen = [s for s in shards if s.numel and (self._only is None or id(s.param) in self._only)]
        passed = {id(s.param) for s in shards if s not in chosen and s.numel}
        skipped = {prefix + name for name, param in module._parameters.items() if id(param) in passed}
        with self._whole(chosen):
            if self._writes:
                self._read(module, prefix, skipped)
        if self._from_first:
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    comm.broadcast(buffer, src=0)
        for name, child in module._modules.items():
            if child is not None:
                self.into(child, f"{prefix}{name}.")

    def _read(self, module: nn.Module, prefix: str, skipped: set[str]) -> None:
        missing: list[str] = []
        state = {name: value for name, value in self._state.items() if name not in skipped} if skipped else self._state
        metadata = {"version": module._version, "assign_to_params_buffers": False}
        module._load_from_state_dict(state, prefix, metadata, True, missing, self.unexpected, self.errors)
        self.missing += [name for name in missing if name not in skipped]

    @contextmanager
    def _whole(self, shards: list[Shard]) -> Iterator[None]:
        """Parameters that can be written, and are cut again afterwards."""
        if self._from_first:
            with GatheredParameters([shard.param for shard in shards], modifier_rank=0):
                yield
            return
        opened = [shard for shard in shards if not shard.whole]
        for shard in opened:  # only this rank's chunk of what was there is needed: nothing is sent
            shard.settle()
            shard.allocate()
            start = shard.axis.rank * shard.chunk
            shard.flat[start : start + shard.chunk].copy_(shard.data)
        fetch.finish(opened)
        yield
        for shard in shards:
            shard.store()
        fetch.release(opened)


def _refuse(
    strict: bool, missing: list[str], unexpected: list[str], errors: list[str], allowed_missing: Collection[str]
) -> None:
    problems = list(errors)
    if strict:
        absent = [name for name in missing if name not in set(allowed_missing)]
        problems += [f"missing: {', '.join(absent)}"] if absent else []
        problems += [f"not in the model: {', '.join(unexpected)}"] if unexpected else []
    if problems:
        hint = "" if errors else ". Pass strict=False to load what fits."
        raise CheckpointError(f"the state dict does not fit the model; {'; '.join(problems)}{hint}")


def load_by(module: nn.Module, state: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Let the user's function do it, with the whole model; rank 0's result counts for what is sharded."""
    with GatheredParameters(module.parameters(), modifier_rank=0):
        function(src=state, dst=module)


# ---- writing


def write_model(state: Mapping[str, Any], folder: Path, name: str, limit: int | str | None) -> None:
    """One file, or files of at most `limit` bytes with an index; `.safetensors` names give that format."""
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(name)
    safe = path.suffix == ".safetensors"
    strange = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if strange and (safe or limit is not None):
        raise UsageError(f"{name}: {strange} are not tensors; write one .bin file, which may hold them")
    write = _write_safetensors if safe else _write_torch
    if limit is None:
        write(folder / name, state)
    else:
        sizes = {key: value.numel() * value.element_size() for key, value in state.items()}
        plan = plan_shards(sizes, limit, path.stem, path.suffix)
        for file, keys in plan.shards.items():
            write(folder / file, state if plan.index is None else {key: state[key] for key in keys})
        plan.write_index(folder)
    sync_directory(folder)


def _write_torch(path: Path, state: Mapping[str, Any]) -> None:
    write_tensorfile(path, state if isinstance(state, OrderedDict) else dict(state))


def _write_safetensors(path: Path, state: Mapping[str, Any]) -> None:
    content = TensorFile(dict(state), {"format": "pt"})

    def produce(stream: Any) -> None:
        for chunk in chunks(content):
            stream.write(chunk)

    write_file(path, produce, needed=lambda: safetensors_size(content))


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
            with GatheredParameters(pair.adapters):
                value += pair.delta().to(value.dtype)
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
