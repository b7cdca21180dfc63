"""One rank's state as DeepSpeed's files: the objects that its loader expects, made of plain values only."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed._package import __version__
from deepspeed.checkpoint.formats.adapters import plain_splits, with_slices
from deepspeed.checkpoint.formats.rank_files import Allocate, Files, Host, rank_entries
from deepspeed.checkpoint.formats.safe_load import StandIns
from deepspeed.checkpoint.formats.training_state import ExpertState, TrainingState
from deepspeed.checkpoint.formats.values import decode, encode, plain
from deepspeed.checkpoint.formats.zero_files.experts import layer_of, number_of
from deepspeed.checkpoint.formats.zero_files.file_names import (
    expert_file,
    experts_optimizer_file,
    layer_file,
    model_file,
    optimizer_file,
    rank_file,
)
from deepspeed.checkpoint.formats.zero_files.flat_writer import (
    scaler_stand_in,
    sharded_by_group,
    sharded_by_parameter,
    sub_groups,
    whole,
)

EXTRA = "ds_extra"
"""The one entry of the model's file that DeepSpeed does not have: what its layout has no place for."""

RESERVED = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "autoep_layers", "folding",
    "sparse_tensor_module_names", EXTRA,
))  # fmt: skip
"""The entries of the model's file that are not the client's."""


def files(state: TrainingState, *, allocate: Allocate | None = None, stand_ins: StandIns | None = None) -> Files:
    """What this rank writes. See `Host` for `allocate` and `stand_ins`."""
    state = with_slices(state)
    host, result = Host(allocate, stand_ins), Files()
    rank_state = rank_entries(state, host)
    if (state.stage == 3 and state.writes_shards) or state.writes_shared:
        name = model_file(state.stage, state.dp_rank, state.mp_rank)
        result.objects[name] = _model_entries(state, host)
    if _layered(state) and state.writes_shared:
        result.objects.update(_layer_files(state, host))
    if state.stage > 0 and state.writes_shards:
        entries = {
            "optimizer_state_dict": _sharded_entries(state, host),
            "ds_config": plain(state.ds_config, "ds_config"),
            "ds_version": __version__,
            "rank_state": rank_state or {},
        }
        result.objects[optimizer_file(state.precision, state.dp_rank, state.mp_rank)] = entries
    elif rank_state is not None:
        result.objects[rank_file(state.number, state.mp_rank)] = rank_state
    if state.experts is not None and state.stage < 3:
        result.objects.update(_expert_files(state, state.experts, host))
    return result


def _expert_files(state: TrainingState, experts: ExpertState, host: Host) -> dict[str, Any]:
    """A file for each expert of which this rank is the first holder, and at stage 0 one for the optimizer."""
    places = {layer: place for place, layer in enumerate(experts.layers) if experts.writes[layer]}
    found: dict[str, Any] = {}
    for name, tensor in state.module.items():
        layer = layer_of(name)
        if layer in places:
            file = expert_file(places[layer], number_of(name), state.mp_rank - state.mp_rank % experts.tensor)
            found.setdefault(file, {})[name] = host.take(tensor)
    if state.stage == 0 and state.groups and experts.first:
        found[experts_optimizer_file(experts.part, state.mp_rank)] = {"optimizer": whole(state, host)}
    return found


def _layer_files(state: TrainingState, host: Host) -> dict[str, Any]:
    """What this rank writes of its layers; experts lie in files of their own."""
    slices = state.mp_size // state.pp_size
    part = state.mp_rank % slices if slices > 1 else None
    found: dict[str, Any] = {}
    for number, prefix in state.layers.here.items() if state.layers is not None else ():
        found[layer_file(number, part)] = OrderedDict(
            (name.removeprefix(prefix), host.take(tensor))
            for name, tensor in state.module.items()
            if name.startswith(prefix) and not _apart(state, name)
        )
    return found


def _model_entries(state: TrainingState, host: Host) -> dict[str, Any]:
    counters, client = state.counters, encode(dict(state.client_state), "client_state")
    # Scripts look for their own keys at the top level, where there are simpler values; none replaces an entry of ours.
    beside = plain({key: value for key, value in decode(client).items() if key not in RESERVED}, "client_state")
    shapes = [OrderedDict(zip(names, sizes, strict=True)) for names, sizes in _shapes(state)]
    apart = state.experts is not None  # then the optimizer of stage 0 has files of its own
    optimizer = whole(state, host) if state.stage == 0 and state.groups and not apart else None
    entries = {
        "module": None if _layered(state) else _module(state, host),
        "buffer_names": [name for name in state.buffers if not _apart(state, name)],
        "optimizer": optimizer,
        "param_shapes": shapes if state.stage else None,
        "frozen_param_shapes": OrderedDict(_frozen(state)) if state.stage else None,
        "shared_params": dict(state.aliases) if state.stage else None,
        "frozen_param_fragments": _frozen_fragments(state, host) if state.stage else None,
        "lr_scheduler": plain(state.lr_scheduler, "lr_scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": counters.skipped_steps,
        "global_steps": counters.global_steps,
        "global_samples": counters.global_samples,
        "dp_world_size": state.dp_size,
        "mp_world_size": state.mp_size,
        "checkpoint_parallel_dimensions": {"pp_degree": state.pp_size, "tp_degree": state.mp_size // state.pp_size},
        "ds_config": plain(state.ds_config, "ds_config"),
        "ds_version": __version__,
        "universal_checkpoint_info": {**_given_info(state), **_universal_info(state)},
        EXTRA: {
            **({"splits": plain_splits(state.splits)} if state.splits else {}),
            "client_state": client,
            "micro_steps": counters.micro_steps,
            "stage": state.stage,
            "copies": state.copies,
            "names": [list(group.names) for group in state.groups],
            "aliases": dict(state.aliases),
            "loss_scale": plain(state.loss_scale, "loss_scale"),
            "overflow": state.overflow,
            "clip": state.clip,
            "module": plain(state.extra, "the model's extra state"),
            "layers": {str(n): prefix for n, prefix in state.layers.known.items()} if state.layers else {},
            **_experts(state),
        },
    }
    if state.experts is not None:
        entries["num_experts"] = list(state.experts.layers.values())
    return {**beside, **entries}


def _layered(state: TrainingState) -> bool:
    """Whether weights lie in files of layers; at stage 3, which DeepSpeed does not have there, they lie in shards."""
    return state.layers is not None and state.stage < 3


def _experts(state: TrainingState) -> dict[str, Any]:
    if state.experts is None:
        return {}
    sizes = [group.ep for group in state.groups]
    found = {"layers": dict(state.experts.layers), "data_first": state.experts.data_first, "sizes": sizes}
    slices = {name: count for name, (_, count) in state.experts.slices.items()}
    dealt = {"tensor": state.experts.tensor} if state.experts.tensor > 1 else {}
    frozen = {name: [list(shape), ep] for name, (shape, ep) in _frozen_experts(state).items()}
    kept = {"frozen": frozen} if frozen else {}
    return {"experts": {**found, **({"slices": slices} if slices else {}), **dealt, **kept}}


def _given_info(state: TrainingState) -> dict[str, Any]:
    """What a trainer such as Megatron-DeepSpeed says in its client state of the slices that it made itself."""
    info = state.client_state.get("universal_checkpoint_info")
    return plain(dict(info), "universal_checkpoint_info") if isinstance(info, Mapping) else {}


def _universal_info(state: TrainingState) -> dict[str, Any]:
    """What DeepSpeed's own converter asks: which parameters are whole on every rank, and which are cut along dim 1."""
    info: dict[str, Any] = {"universal_checkpoint_version": 0.4}
    if state.splits:
        patterns = {name: f"^{re.escape(name)}$" for name in state.module if name not in state.buffers}
        fused = [
            name for name, split in state.splits.items() if split.shared or any(len(part) > 1 for part in split.parts)
        ]
        info["tp_replicated_parameter_patterns"] = [p for name, p in patterns.items() if name not in state.splits]
        info["parameter_with_row_parallelism_patterns"] = [
            patterns[name] for name, split in state.splits.items() if split.dim == 1 and name in {*patterns} - {*fused}
        ]
        info["autotp_unsupported_parameter_patterns"] = [patterns[name] for name in fused if name in patterns]
    return info


def _module(state: TrainingState, host: Host) -> OrderedDict[str, Tensor]:
    if state.stage < 3:
        here = {name: tensor for name, tensor in state.module.items() if not _apart(state, name)}
        return OrderedDict((name, host.take(tensor)) for name, tensor in here.items())
    kept = set(state.buffers)
    return OrderedDict(
        (name, host.take(tensor) if name in kept else torch.empty(0, dtype=tensor.dtype))
        for name, tensor in state.module.items()
    )


def _apart(state: TrainingState, name: str) -> bool:
    """Whether this is in a file of an expert."""
    return state.experts is not None and layer_of(name) in state.experts.layers


def _shapes(state: TrainingState) -> list[tuple[list[str], list[torch.Size]]]:
    """The trained parameters of each flat tensor; those without elements are in none."""
    result = []
    for group in state.groups:
        members = [index for index, shape in enumerate(group.shapes) if shape.numel()]
        parts = sub_groups(group, members, state) if state.stage == 3 else [members]
        result += [([group.names[i] for i in part], [group.shapes[i] for i in part]) for part in parts]
    return result


def _frozen(state: TrainingState) -> dict[str, torch.Size]:
    empty = {
        name: shape
        for group in state.groups
        for name, shape in zip(group.names, group.shapes, strict=True)
        if not shape.numel()
    }
    return {**{name: shape for name, shape in state.frozen.items() if not _apart(state, name)}, **empty}


def _frozen_experts(state: TrainingState) -> dict[str, tuple[torch.Size, int]]:
    """Stage 3: this rank's experts that are not trained, each with the ranks over which those of its layer are spread.

    Files of experts have them at other stages.
    """
    if state.experts is None or state.stage != 3:
        return {}
    here = {name: shape for name, shape in state.frozen.items() if _apart(state, name)}
    return {name: (shape, state.experts.sizes[str(layer_of(name))]) for name, shape in here.items()}


def _frozen_fragments(state: TrainingState, host: Host) -> OrderedDict[str, Tensor]:
    result = OrderedDict()
    for name, shape in _frozen(state).items():
        tensor = state.module[name]
        if state.stage < 3:
            result[name] = host.take(tensor)
        else:
            chunk = -(-shape.numel() // state.dp_size)
            result[name] = host.flat([(0, tensor[:chunk])], chunk, tensor.dtype)
    for name, (shape, ep) in _frozen_experts(state).items():
        assert state.experts is not None, "only a model with experts has some that are frozen"
        chunk = -(-shape.numel() * ep // (state.dp_size * state.experts.tensor))
        result[name] = host.flat([(0, state.module[name][:chunk])], chunk, state.module[name].dtype)
    return result


def _sharded_entries(state: TrainingState, host: Host) -> dict[str, Any]:
    by_parameter = state.stage == 3
    entries: dict[str, Any] = (sharded_by_parameter if by_parameter else sharded_by_group)(state, host)
    # [Note: objects without classes] in flat_writer.py
    scaler = scaler_stand_in(state.loss_scale) if by_parameter else None
    if scaler is not None:
        entries["loss_scaler"] = scaler
    entries["loss_scale"] = plain(state.loss_scale, "loss_scale")
    uneven = _uneven_scalars(state)
    if uneven is not None:
        entries["parameter_scalars"] = uneven
    untouched = [name for group in state.groups for name in group.without_state()]
    return {**entries, "without_state": untouched} if untouched else entries


def _uneven_scalars(state: TrainingState) -> dict[str, Any] | None:
    """Per parameter, where not all of a group's agree: a flat tensor has room for one set only."""
    held: dict[str, Mapping[str, Any]] = {}
    uneven = False
    for group in state.groups:
        intervals = map(group.interval, range(len(group.names)))
        rows = zip(group.names, group.scalars, intervals, strict=True)
        own = {name: scalars for name, scalars, (start, stop) in rows if start < stop}
        uneven = uneven or not all(_same(scalars, next(iter(own.values()))) for scalars in own.values())
        held.update(own)
    return (
        {name: plain(scalars, f"the optimizer's state of {name}") for name, scalars in held.items()} if uneven else None
    )


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(one[key] == other[key]) for key in one)
