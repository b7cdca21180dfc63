"""One rank's state as safetensors: its own fragments, each byte of the checkpoint written by exactly one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from deepspeed._version import __version__
from deepspeed.checkpoint.formats.client_values import encode
from deepspeed.checkpoint.formats.plain_values import plain
from deepspeed.checkpoint.formats.rank_files import Allocate, Files, Host, rank_entries
from deepspeed.checkpoint.formats.safetensors import Content
from deepspeed.checkpoint.formats.training_state import GroupState, TrainingState
from deepspeed.fragments import Block, FlatLayout, Striped

__all__ = ["INDEX", "SMALL", "VERSION", "files", "fragment_file", "rank_file"]

INDEX = "index.json"
SMALL = "training_state.pt"
VERSION = 1


def fragment_file(dp_rank: int, mp_rank: int = 0) -> str:
    """The fragments of a rank."""
    return f"fragments_{dp_rank:05d}_{mp_rank:02d}.safetensors"


def rank_file(dp_rank: int, mp_rank: int = 0) -> str:
    """What a rank alone knows: random states, position in its data."""
    return f"rank_state_{dp_rank:05d}_{mp_rank:02d}.pt"


def files(state: TrainingState, *, allocate: Allocate | None = None) -> Files:
    """What this rank writes; rank 0 also the index and what all ranks share."""
    host, result, content = Host(allocate), Files(), Content()
    scalars: dict[str, Any] = {}
    for group in state.groups:
        layout = group.layout or _spread(tuple(shape.numel() for shape in group.shapes), state.dp_size)
        for index, name in enumerate(group.names):
            held = group.scalars[index]
            for kind, tensor in _trained(group, layout, index, state.dp_rank):
                content.tensors[f"{kind}:{name}"] = host.take(tensor, alone=False)
            if held:
                scalars[name] = _numbers(held, name, content, host)
    for name, tensor in _fixed(state):
        content.tensors[f"param:{name}"] = host.take(tensor, alone=False)
    content.metadata["scalars"] = json.dumps(scalars)
    result.tensors[fragment_file(state.dp_rank, state.mp_rank)] = content
    own = rank_entries(state, host)
    if own is not None:
        result.objects[rank_file(state.dp_rank, state.mp_rank)] = own
    if state.writes_shared and state.mp_rank == 0:
        result.texts[INDEX] = json.dumps(_index(state), indent=1)
        result.objects[SMALL] = _small(state)
    return result


def _spread(numels: tuple[int, ...], world: int) -> Block:
    """Who writes what of tensors that every rank holds whole."""
    return Block(numels, world, align=1)


def _trained(group: GroupState, layout: FlatLayout, index: int, dp_rank: int) -> Iterator[tuple[str, Tensor]]:
    rank = dp_rank if group.layout is None else group.rank
    start, stop = layout.interval(index, rank)
    for kind in group.kinds:
        tensor = group.tensors[kind][index]
        if tensor is not None and start < stop:
            flat = tensor.detach().reshape(-1)
            yield kind, flat[start:stop] if group.layout is None else flat[: stop - start]


def _numbers(scalars: Any, name: str, content: Content, host: Host) -> dict[str, Any]:
    """Numbers go into the header; a tensor of one element stays a tensor."""
    numbers = {}
    for key, value in plain(scalars, f"the optimizer's state of {name}").items():
        if isinstance(value, Tensor):
            content.tensors[f"scalar:{key}:{name}"] = host.take(value, alone=False)
        else:
            numbers[key] = value
    return numbers


def _fixed(state: TrainingState) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of what no group trains, and of the weights where there is no optimizer."""
    names = list(state.frozen)
    if state.stage == 3:
        for name in names:
            start, stop = Striped((state.frozen[name].numel(),), state.dp_size).interval(0, state.dp_rank)
            yield name, state.module[name].detach().reshape(-1)[: stop - start]
    else:
        layout = _spread(tuple(state.module[name].numel() for name in names), state.dp_size)
        for index, name in enumerate(names):
            start, stop = layout.interval(index, state.dp_rank)
            if start < stop:
                yield name, state.module[name].detach().reshape(-1)[start:stop]
    if state.dp_rank == 0:
        yield from ((name, state.module[name]) for name in state.buffers)


def _layout(group: GroupState) -> dict[str, Any]:
    if isinstance(group.layout, Striped):
        return {"split": "each"}
    if isinstance(group.layout, Block):
        return {"split": "all", "align": group.layout.align, "gap": group.layout.gap}
    return {"split": "all", "align": 1, "gap": 1}


def _index(state: TrainingState) -> dict[str, Any]:
    trained = {name: shape for group in state.groups for name, shape in zip(group.names, group.shapes, strict=True)}
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.module.items()}
    return {
        "format": "deepspeed-fragments",
        "version": VERSION,
        "ds_version": __version__,
        "stage": state.stage,
        "precision": state.precision,
        "ranks": state.dp_size,
        "model_parallel_ranks": state.mp_size,
        "files": [fragment_file(rank) for rank in range(state.dp_size)],
        "aliases": dict(state.aliases),
        "buffers": {name: [list(state.module[name].shape), dtypes[name]] for name in state.buffers},
        "frozen": {
            "split": "each" if state.stage == 3 else "all",
            "tensors": {name: [list(shape), dtypes[name]] for name, shape in state.frozen.items()},
        },
        "groups": [
            {
                **_layout(group),
                "kinds": list(group.kinds),
                "tensors": {name: [list(trained[name]), dtypes.get(name)] for name in group.names},
            }
            for group in state.groups
        ],
        "order": list(state.module),
    }


def _small(state: TrainingState) -> dict[str, Any]:
    counters = state.counters
    return {
        "hyperparameters": [plain(group.hyperparameters, "hyperparameters") for group in state.groups],
        "counters": {
            "global_steps": counters.global_steps,
            "global_samples": counters.global_samples,
            "skipped_steps": counters.skipped_steps,
            "micro_steps": counters.micro_steps,
        },
        "loss_scale": plain(state.loss_scale, "loss_scale"),
        "overflow": state.overflow,
        "clip": state.clip,
        "lr_scheduler": plain(state.lr_scheduler, "lr_scheduler"),
        "client_state": encode(dict(state.client_state), "client_state"),
        "ds_config": plain(state.ds_config, "ds_config"),
        "module": plain(state.extra, "the model's extra state"),
    }
