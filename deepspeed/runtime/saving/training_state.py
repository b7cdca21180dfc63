"""What this rank gives to a checkpoint: the parts of an engine as one `TrainingState`. Nothing here communicates."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.checkpoint.formats.training_state import Counters, ExpertState, GroupState, TrainingState
from deepspeed.config.explain import without_secrets
from deepspeed.fragments import DimSplit, FlatLayout
from deepspeed.ops.adam import FusedAdam
from deepspeed.precision.scale import DynamicScale, LossScale, NoScale
from deepspeed.runtime.dataloader import position_of
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.rng import capture_states
from deepspeed.tensor_parallel import marked_splits, splits_of
from deepspeed.zero.interface import ShardGroup, plain_state, shard_of

# the loss scale: our names → those of DeepSpeed's checkpoints
_NAMES = {
    "scale": "cur_scale",
    "step": "cur_iter",
    "last_overflow": "last_overflow_iter",
    "hysteresis_left": "cur_hysteresis",
    "skipped_in_a_row": "_overflows_in_a_row",
}


def attributes_of(scale: LossScale) -> dict[str, Any] | None:
    """What DeepSpeed's scaler objects know; None where the loss is not scaled."""
    if isinstance(scale, NoScale):
        return None
    if not isinstance(scale, DynamicScale):
        return {"cur_scale": scale.value, "dynamic": False}
    return {
        **{_NAMES[name]: value for name, value in scale.state_dict().items()},
        "dynamic": True,
        "scale_factor": scale.factor,
        "scale_window": scale.window,
        "min_scale": scale.minimum,
        "delayed_shift": scale.hysteresis,
        "consecutive_hysteresis": scale.consecutive_hysteresis,
        "raise_error_at_min_scale": scale.raise_at_minimum,
        "dtype": torch.float16,
    }


def continue_scale(scale: LossScale, attributes: Mapping[str, Any] | None) -> None:
    """Go on where a saved scale was; one that was of another kind has nothing to go on from."""
    if attributes is None or not attributes.get("dynamic") or not isinstance(scale, DynamicScale):
        return
    # DeepSpeed's stage 0 stores no hysteresis, and it never counts overflows in a row.
    state = {**scale.state_dict(), "hysteresis_left": scale.hysteresis, "skipped_in_a_row": 0}
    state.update({ours: attributes[theirs] for ours, theirs in _NAMES.items() if theirs in attributes})
    scale.load_state_dict(state)


_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class RunState:
    """What of a run does not belong to the engine's parts."""

    counters: Counters = field(default_factory=Counters)
    lr_scheduler: Any = None
    loader: Any = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    kinds: Sequence[Sequence[str]] = ()
    """The optimizer's states that any rank has, per group."""
    own_buffers: bool = False
    """This rank's buffers are not those of the first."""


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """The parameters of a group of the optimizer, in the order of their layout."""

    names: Sequence[str]
    params: Sequence[nn.Parameter]
    masters: Sequence[nn.Parameter | None]
    """What the optimizer updates of each; None where nothing of it lies here."""
    options: dict[str, Any]
    layout: FlatLayout | None = None
    rank: int = 0

    def interval(self, place: int) -> tuple[int, int]:
        """The elements of the parameter that lie here."""
        if self.layout is None:
            return 0, shape_of(self.params[place]).numel()
        return self.layout.interval(place, self.rank)


def shape_of(param: nn.Parameter) -> torch.Size:
    """Of the whole parameter."""
    shard = shard_of(param)
    return param.shape if shard is None else shard.shape


def model_names(parts: Parts) -> dict[int, str]:
    """The name of each parameter in the whole model, by id; of a tied one its first."""
    return {id(param): parts.name_of(name) for name, param in parts.module.named_parameters()}


def model_values(parts: Parts) -> dict[str, Any]:
    """The module's state dict by the names in the whole model."""
    return {parts.name_of(name): value for name, value in parts.module.state_dict(keep_vars=True).items()}


def listed_groups(parts: Parts) -> list[ListedGroup]:
    """Every group that the optimizer trains; empty without an optimizer."""
    return [] if parts.states is None else [_listed(group, parts) for group in parts.states.groups]


def _listed(group: ShardGroup, parts: Parts) -> ListedGroup:
    held = {id(piece.param): piece.master for piece in group.pieces}
    masters = [held.get(id(param)) for param in group.params]
    names = [parts.name_of(name) for name in group.names]
    if group.whole:
        return ListedGroup(names, group.params, masters, group.options)
    return ListedGroup(names, group.params, masters, group.options, group.layout, group.axis.rank)


def settle_edits(parts: Parts) -> None:
    """Let masters and shards follow what was written into the parameters."""
    if parts.states is not None:
        parts.states.adopt_edits()
    for param in parts.module.parameters():
        shard = shard_of(param)
        if shard is not None and shard.persistent and not shard.alone and shard.edited:
            shard.store()


def buffer_sum(module: nn.Module) -> int:
    """A checksum of all buffers of the state dict: ranks whose buffers are alike have the same."""
    total = 0
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            data = value.detach().cpu().contiguous().reshape(-1)
            total = zlib.crc32(name.encode(), total)
            if data.numel():
                total = zlib.crc32(data.view(torch.uint8).numpy().data, total)
    return total


def kinds_of(parts: Parts) -> list[list[str]]:
    """Which states the optimizer has on this rank, per group: ranks that hold nothing learn it from the others."""
    if parts.basic_optimizer is None:
        return []
    return [sorted(_states(parts.basic_optimizer, group)[0]) for group in _groups(parts, exclude_frozen=False)]


def collect(parts: Parts, run: RunState, *, exclude_frozen: bool = False) -> TrainingState:
    """This rank's part of everything; tensors are those of the engine, not copies."""
    schema = parts.config.schema
    stage = int(schema.zero_optimization.stage)
    axis, model = parts.layout.samples, parts.layout.model
    shard, copies = parts.sharded.axes.levels(axis)
    groups = [] if parts.basic_optimizer is None else _groups(parts, exclude_frozen)
    states = []
    for place, group in enumerate(groups):
        known = run.kinds[place] if place < len(run.kinds) else ()
        ep = 0 if parts.experts is None or not group.params else parts.experts.size_of(group.params[0])
        states.append(replace(_group_state(parts.basic_optimizer, group, known), ep=ep))
    module, buffers, aliases, extra = _module(parts, exclude_frozen)
    trained = {name for group in groups for name in group.names}
    shapes = {parts.name_of(name): shape_of(param) for name, param in parts.module.named_parameters()}
    frozen = {name: shape for name, shape in shapes.items() if name in module and name not in trained}
    scheduler = getattr(run.lr_scheduler, "state_dict", None)
    return TrainingState(
        stage=stage,
        precision=_PRECISIONS.get(parts.precision.param, "fp32"),
        module=module,
        groups=states,
        buffers=buffers,
        frozen=frozen,
        aliases=aliases,
        extra=extra,
        dp_rank=shard.rank,
        dp_size=shard.size,
        copy=0 if copies is None else copies.rank,
        copies=1 if copies is None else copies.size,
        mp_rank=model.rank,
        mp_size=model.size,
        pp_size=parts.layout.pipeline.size if parts.layers is not None else 1,
        layers=parts.layers,
        splits=splits_in_files(parts),
        counters=run.counters,
        loss_scale=attributes_of(parts.scale),
        overflow=bool(getattr(parts.optimizer, "overflow", False)),
        clip=schema.gradient_clipping,
        sub_group_size=int(schema.zero_optimization.sub_group_size),
        flat_masters=isinstance(parts.basic_optimizer, FusedAdam),
        lr_scheduler=None if scheduler is None else scheduler(),
        data=position_of(run.loader),
        pacing={} if parts.pacing is None else parts.pacing.state_dict(),
        rng=capture_states(),
        reductions=parts.sharded.reduction_states(),
        own_buffers={name: module[name] for name in buffers} if run.own_buffers else None,
        client_state=run.client_state,
        ds_config=without_secrets(parts.config.loaded.raw),
        experts=_experts(parts, module),
        shares=axis.rank == 0 or (schema.checkpoint.use_node_local_storage and parts.local_rank == 0),
    )


def splits_in_files(parts: Parts) -> dict[str, DimSplit]:
    """How parameters are cut over tensor-parallel ranks, by their names in the whole model; empty where unknown."""
    found = splits_of(parts.module)
    marked = marked_splits(parts.module, parts.layout.tensor.size, found) if parts.layout.tensor.size > 1 else {}
    both = {} if marked is None else {**found, **marked}
    return {parts.name_of(name): split for name, split in both.items()}


def _experts(parts: Parts, module: Mapping[str, Tensor]) -> ExpertState | None:
    """The experts of the model, as far as `module` has them."""
    experts = parts.experts
    if experts is None:
        return None
    tensor = parts.layout.tensor.size if experts.wide else 1
    writes = {layer.listed: layer.groups.edp.rank == 0 for layer in experts.layers}
    first = experts.most.edp.rank == 0 or (tensor > 1 and parts.layout.samples.rank == 0)
    sizes = {layer.listed: layer.groups.ep.size for layer in experts.layers}
    part = experts.most.ep.rank
    slices = {name: slice_ for name, slice_ in experts.slices.items() if name in module}
    return ExpertState(experts.numbers, experts.data_first, part, first, writes, slices, sizes, tensor)


def _groups(parts: Parts, exclude_frozen: bool) -> list[ListedGroup]:
    """As the files list them: at stage 0 all that the optimizer was given, at the others what it trains."""
    all_given = not parts.config.schema.zero_optimization.shards_states and not exclude_frozen
    optimizer = parts.basic_optimizer
    result = []
    for group in listed_groups(parts):
        if all_given or group.layout is not None or optimizer is None:
            result.append(group)
            continue
        kept = [
            (name, param, master)
            for name, param, master in zip(group.names, group.params, group.masters, strict=True)
            if param.requires_grad or (master is not None and optimizer.state.get(master))
        ]
        names, params, masters = [row[0] for row in kept], [row[1] for row in kept], [row[2] for row in kept]
        result.append(ListedGroup(names, params, masters, group.options))
    return result


def _states(optimizer: Optimizer, group: ListedGroup) -> tuple[dict[str, list[Tensor | None]], list[dict[str, Any]]]:
    """The states with one element per element of their parameter, by name, and the others, by parameter."""
    tensors: dict[str, list[Tensor | None]] = {}
    others: list[dict[str, Any]] = [{} for _ in group.names]
    for place, master in enumerate(group.masters):
        # values go to any cut of the parameter, codes of blocks do not
        for key, value in plain_state(optimizer, master).items():
            if key != "step" and isinstance(value, Tensor) and master is not None and value.shape == master.shape:
                tensors.setdefault(key, [None] * len(group.names))[place] = value
            else:
                others[place][key] = value
    return tensors, others


def _group_state(optimizer: Optimizer | None, group: ListedGroup, known: Sequence[str]) -> GroupState:
    assert optimizer is not None, "groups are those of an optimizer"
    tensors, scalars = _states(optimizer, group)
    masters = [None if master is None else master.detach() for master in group.masters]
    return GroupState(
        names=list(group.names),
        shapes=[shape_of(param) for param in group.params],
        tensors={"master": masters, **tensors},
        scalars=scalars,
        hyperparameters={key: value for key, value in group.options.items() if key not in ("params", "param_names")},
        layout=group.layout,
        rank=group.rank,
        known=tuple(known),
    )


def _module(parts: Parts, exclude_frozen: bool) -> tuple[dict[str, Tensor], list[str], dict[str, str], dict[str, Any]]:
    """The state dict, which of it are buffers, its tied names, and what of it is no tensor."""
    owners, flat = model_names(parts), parts.config.schema.zero_optimization.shards_parameters
    values: dict[str, Tensor] = {}
    buffers: list[str] = []
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    for name, value in model_values(parts).items():
        if isinstance(value, nn.Parameter) and id(value) in owners:
            if exclude_frozen and not value.requires_grad:
                continue
            values[name] = _value(value, flat=flat)
            owner = owners[id(value)]
            if owner != name:
                aliases[name] = owner
                values.setdefault(owner, values[name])
        elif isinstance(value, Tensor):
            values[name] = value.detach()
            buffers.append(name)
        else:
            extra[name] = value
    return values, buffers, aliases, extra


def _value(param: nn.Parameter, *, flat: bool) -> Tensor:
    shard = shard_of(param)
    if shard is not None and not (shard.alone and shard.whole):
        return shard.local
    return param.detach().reshape(-1) if flat else param.detach()
