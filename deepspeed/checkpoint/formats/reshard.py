"""A checkpoint as the state of one rank of any other topology: what every conversion is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.training_state import GroupState, TrainingState
from deepspeed.errors import CheckpointError
from deepspeed.fragments import ContiguousLayout, FlatLayout, StripedLayout

_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def state_of(source: Source, *, stage: int, rank: int, world: int) -> TrainingState:
    """What `rank` of `world` would hold at a stage; only its own part is read."""
    groups = [_group(source, names, settings, stage, rank, world) for names, settings in source.groups]
    trained = {name for group in groups for name in group.names}
    kept = source.shapes
    frozen = {name: shape for name, shape in kept.items() if name not in trained and name not in source.buffers}
    if not groups and any("exp_avg" in source.kinds(name) for name in kept):
        raise CheckpointError("the checkpoint's optimizer state cannot be converted: its groups are unknown")
    module: dict[str, Tensor] = {}
    dtypes = {}
    for name, shape in kept.items():
        dtypes[name] = source.dtype(name) or torch.float32
        module[name] = (
            source.buffers[name] if name in source.buffers else _weight(source, name, shape, stage, rank, world)
        )
    module.update({alias: module[owner] for alias, owner in source.aliases.items()})
    small = source.small
    widths = [dtypes[name] for name in trained] or list(dtypes.values())
    precision = next((_PRECISIONS[dtype] for dtype in widths if dtype in _PRECISIONS), "fp32")
    own = source.rank_state(rank) if world == source.world else {}
    return TrainingState(
        stage=stage,
        precision=precision,
        module=module,
        groups=groups,
        buffers=list(source.buffers),
        frozen=frozen,
        aliases=dict(source.aliases),
        extra=small.extra,
        dp_rank=rank,
        dp_size=world,
        counters=small.counters,
        loss_scale=small.loss_scale,
        overflow=small.overflow,
        clip=small.ds_config.get("gradient_clipping") if small.clip is None else small.clip,
        lr_scheduler=small.lr_scheduler,
        data=own.get("data"),
        pacing=own.get("pacing") or {},
        rng=own.get("rng"),
        client_state=small.client_state,
        ds_config=small.ds_config,
    )


def _weight(source: Source, name: str, shape: torch.Size, stage: int, rank: int, world: int) -> Tensor:
    dtype = source.dtype(name) or torch.float32
    if stage < 3:
        return source.read(name, "param").view(shape).to(dtype, copy=True)  # a view of a file holds on to all of it
    start, stop = StripedLayout((shape.numel(),), world).interval(0, rank)
    return source.read(name, "param", start, stop).to(dtype, copy=True)


def _group(
    source: Source, names: Sequence[str], settings: Mapping[str, Any], stage: int, rank: int, world: int
) -> GroupState:
    shapes = [source.shapes[name] for name in names]
    numels = tuple(shape.numel() for shape in shapes)
    layouts: Mapping[int, FlatLayout | None] = {0: None, 3: StripedLayout(numels, world)}
    layout = layouts.get(stage, ContiguousLayout(numels, world))
    tensors: dict[str, list[Tensor | None]] = {"master": []}
    for index, name in enumerate(names):
        start, stop = layout.interval(index, rank) if layout is not None else (0, numels[index])
        available = set(source.kinds(name)) - {"param"}
        for kind in (*tensors, *sorted(available - tensors.keys())):
            column = tensors.setdefault(kind, [None] * index)
            column.append(_part(source, name, kind, start, stop) if kind in available else None)
    scalars = [source.scalars(name) for name in names]
    return GroupState(list(names), shapes, tensors, scalars, dict(settings), layout, rank)


def _part(source: Source, name: str, kind: str, start: int, stop: int) -> Tensor | None:
    if start == stop:
        return None
    part = source.read(name, kind, start, stop)
    return part.float() if kind == "master" else part
