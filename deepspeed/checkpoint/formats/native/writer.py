"""One rank's state as safetensors: its own fragments, each byte of the checkpoint written by exactly one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from deepspeed._package import __version__
from deepspeed.checkpoint.formats.adapters import plain_splits, with_slices
from deepspeed.checkpoint.formats.rank_files import Allocate, Files, Host, rank_entries
from deepspeed.checkpoint.formats.safetensors import TensorFile
from deepspeed.checkpoint.formats.training_state import GroupState, TrainingState
from deepspeed.checkpoint.formats.values import encode, plain
from deepspeed.checkpoint.formats.zero_files.experts import ExpertLayers, layer_of
from deepspeed.fragments import ContiguousLayout, FlatLayout, StripedLayout

INDEX = "index.json"
VERSIONS = (1, 2)
"""Of the index: of one model-parallel rank, and of several, each of which has one."""


def index_file(mp_rank: int = 0) -> str:
    """What a model-parallel rank holds, and where it lies."""
    return f"index_{mp_rank:02d}.json" if mp_rank else INDEX


def small_file(mp_rank: int = 0) -> str:
    """What is no tensor, and all ranks have alike but for the groups of the optimizer."""
    return f"training_state_{mp_rank:02d}.pt" if mp_rank else "training_state.pt"


def fragment_file(dp_rank: int, mp_rank: int = 0) -> str:
    return f"fragments_{dp_rank:05d}_{mp_rank:02d}.safetensors"


def rank_file(dp_rank: int, mp_rank: int = 0) -> str:
    """What a rank alone knows: random states, position in its data."""
    return f"rank_state_{dp_rank:05d}_{mp_rank:02d}.pt"


def files(state: TrainingState, *, allocate: Allocate | None = None) -> Files:
    """What this rank writes; the first of a model-parallel rank also the index and what its ranks share."""
    state = with_slices(state)
    host, result = Host(allocate), Files()
    if state.writes_shards:
        result.tensors[fragment_file(state.dp_rank, state.mp_rank)] = _fragments(state, host)
    own = rank_entries(state, host)
    if own is not None:
        result.objects[rank_file(state.number, state.mp_rank)] = own
    if state.writes_shared:
        result.texts[index_file(state.mp_rank)] = json.dumps(_index(state), indent=1)
        result.objects[small_file(state.mp_rank)] = _small(state)
    return result


def _fragments(state: TrainingState, host: Host) -> TensorFile:
    """What of all tensors lies on this rank and is to be written by it."""
    content = TensorFile()
    scalars: dict[str, Any] = {}
    for group in state.groups:
        for index, name in enumerate(group.names):
            held = group.scalars[index]
            for kind, tensor in _trained(group, index, state):
                content.tensors[f"{kind}:{name}"] = host.take(tensor, alone=False)
            if held:
                scalars[name] = _numbers(held, name, content, host)
    for fixed in _fixed(state):
        for name, tensor in _parts(fixed, state):
            content.tensors[f"param:{name}"] = host.take(tensor, alone=False)
    if state.dp_rank == 0:
        for name in _shared_buffers(state):
            content.tensors[f"param:{name}"] = host.take(state.module[name], alone=False)
    content.metadata["scalars"] = json.dumps(scalars)
    return content


def _spread(numels: tuple[int, ...], world: int) -> ContiguousLayout:
    """Who writes what of tensors that every rank holds whole."""
    return ContiguousLayout(numels, world, align=1)


def _place(state: TrainingState, ep: int) -> tuple[int, int]:
    """(ranks that have the same elements of experts on `ep` ranks, which of these this one is); 0: of what is dense."""
    if ep == 0 or state.experts is None:
        return state.dp_size, state.dp_rank
    grid = ExpertLayers(state.experts.layers, state.dp_size, state.experts.data_first).grid(ep)
    return grid.edp, grid.copy_of(state.dp_rank)


def _trained(group: GroupState, index: int, state: TrainingState) -> Iterator[tuple[str, Tensor]]:
    world, rank = _place(state, group.ep)
    layout: FlatLayout = group.layout or _spread(tuple(shape.numel() for shape in group.shapes), world)
    start, stop = layout.interval(index, rank if group.layout is None else group.rank)
    for kind in group.kinds:
        tensor = group.tensors[kind][index]
        if tensor is not None and start < stop:
            flat = tensor.detach().reshape(-1)
            yield kind, flat[start:stop] if group.layout is None else flat[: stop - start]


def _numbers(scalars: Any, name: str, content: TensorFile, host: Host) -> dict[str, Any]:
    """Numbers go into the header; a tensor of one element stays a tensor."""
    numbers = {}
    for key, value in plain(scalars, f"the optimizer's state of {name}").items():
        if isinstance(value, Tensor):
            content.tensors[f"scalar:{key}:{name}"] = host.take(value, alone=False)
        else:
            numbers[key] = value
    return numbers


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Tensors that no group trains and that lie on the same ranks."""

    names: Sequence[str]
    ep: int
    """Over how many ranks they are spread, if they are experts'; 0: they are not."""
    striped: bool
    """Each is cut over its ranks; else they lie whole on all of them."""


def _fixed(state: TrainingState) -> list[_Fixed]:
    """The first one is of what is dense, and is there always."""
    sizes = {} if state.experts is None else state.experts.sizes
    kinds = [(state.frozen, state.stage == 3), (state.buffers, False)]
    dense = [name for name in state.frozen if layer_of(name) not in sizes]
    found = [_Fixed(dense, 0, state.stage == 3)]
    for ep in sorted(set(sizes.values())):
        for names, striped in kinds:
            own = [name for name in names if sizes.get(layer_of(name) or "") == ep]
            found += [_Fixed(own, ep, striped)] if own else []
    return found


def _parts(fixed: _Fixed, state: TrainingState) -> Iterator[tuple[str, Tensor]]:
    """What of them this rank writes."""
    world, rank = _place(state, fixed.ep)
    if fixed.striped:
        for name in fixed.names:
            start, stop = StripedLayout((state.frozen[name].numel(),), world).interval(0, rank)
            yield name, state.module[name].detach().reshape(-1)[: stop - start]
        return
    layout = _spread(tuple(state.module[name].numel() for name in fixed.names), world)
    for index, name in enumerate(fixed.names):
        start, stop = layout.interval(index, rank)
        if start < stop:
            yield name, state.module[name].detach().reshape(-1)[start:stop]


def _shared_buffers(state: TrainingState) -> list[str]:
    """Those that all ranks have alike."""
    sizes = {} if state.experts is None else state.experts.sizes
    return [name for name in state.buffers if layer_of(name) not in sizes]


def _layout(group: GroupState) -> dict[str, Any]:
    if isinstance(group.layout, StripedLayout):
        return {"split": "each"}
    if isinstance(group.layout, ContiguousLayout):
        return {"split": "all", "align": group.layout.align, "gap": group.layout.gap}
    return {"split": "all", "align": 1, "gap": 1}


def _index(state: TrainingState) -> dict[str, Any]:
    trained = {name: shape for group in state.groups for name, shape in zip(group.names, group.shapes, strict=True)}
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.module.items()}
    dense, *of_experts = _fixed(state)

    def tensors(fixed: _Fixed) -> dict[str, Any]:
        shapes = {name: list(state.frozen.get(name, state.module[name].shape)) for name in fixed.names}
        named = {name: [shape, dtypes[name]] for name, shape in shapes.items()}
        return {"split": "each" if fixed.striped else "all", "tensors": named}

    return {
        "format": "deepspeed-fragments",
        "version": VERSIONS[state.mp_size > 1],
        "ds_version": __version__,
        "stage": state.stage,
        "precision": state.precision,
        "ranks": state.dp_size,
        **({"copies": state.copies} if state.copies > 1 else {}),
        "model_parallel_ranks": state.mp_size,
        "pipeline_stages": state.pp_size,
        **({"splits": plain_splits(state.splits)} if state.splits else {}),
        "files": [fragment_file(rank, state.mp_rank) for rank in range(state.dp_size)],
        "aliases": dict(state.aliases),
        "buffers": {name: [list(state.module[name].shape), dtypes[name]] for name in _shared_buffers(state)},
        "frozen": tensors(dense),
        "groups": [
            {
                **_layout(group),
                **({"ep": group.ep} if group.ep else {}),
                "kinds": list(group.kinds),
                "tensors": {name: [list(trained[name]), dtypes.get(name)] for name in group.names},
            }
            for group in state.groups
        ],
        "order": list(state.module),
        **_experts(state, [{"ep": fixed.ep, **tensors(fixed)} for fixed in of_experts]),
    }


def _experts(state: TrainingState, fixed: list[dict[str, Any]]) -> dict[str, Any]:
    """Names in the index are those of rank 0: what other ranks have follows from this."""
    if state.experts is None:
        return {}
    slices = {name: count for name, (_, count) in state.experts.slices.items()}
    told = {"layers": dict(state.experts.layers), "data_first": state.experts.data_first}
    return {"experts": {**told, "fixed": fixed, "slices": slices}}


def _small(state: TrainingState) -> dict[str, Any]:
    return {
        "hyperparameters": [plain(group.hyperparameters, "hyperparameters") for group in state.groups],
        "counters": asdict(state.counters),
        "loss_scale": plain(state.loss_scale, "loss_scale"),
        "overflow": state.overflow,
        "clip": state.clip,
        "lr_scheduler": plain(state.lr_scheduler, "lr_scheduler"),
        "client_state": encode(dict(state.client_state), "client_state"),
        "ds_config": plain(state.ds_config, "ds_config"),
        "module": plain(state.extra, "the model's extra state"),
    }
