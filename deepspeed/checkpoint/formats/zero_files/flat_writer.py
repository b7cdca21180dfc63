"""Optimizer groups as DeepSpeed's flat tensors: whole at stage 0, cut by group at 1 and 2, by parameter at 3.

[Note: objects without classes]
DeepSpeed's loader asks a fragment address for `.numel` and `.start`, and at stage 3 the loss scaler for `.cur_scale`,
`.scale_loss(loss)` and `.update_scale(overflow)`. `torch.load(weights_only=True)` builds an `OrderedDict` together with
its attributes, so that is what such an object is here. A scaler whose factor is one needs only an identity as
`scale_loss`, which `torch.Tensor` is for a tensor of any dtype and device (it returns an alias that autograd follows),
and something that swallows a bool as `update_scale`, which `complex` does. Nothing that the safe loader admits can
multiply by another factor: at stage 3 in fp16 there is no such object, and the entry is left out. DeepSpeed then stops
at the load, naming the entry. At stages 1 and 2 it goes on with its own initial scale. `with_classes` writes what it
wants instead, at the price of a file that needs its classes to be read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed._package import __version__
from deepspeed.checkpoint.formats.rank_files import Host
from deepspeed.checkpoint.formats.training_state import GroupState, TrainingState
from deepspeed.checkpoint.formats.values import plain
from deepspeed.errors import UsageError
from deepspeed.fragments import ContiguousLayout, StripedLayout
from deepspeed.precision.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase


def whole(state: TrainingState, host: Host) -> dict[str, Any]:
    """Stage 0: the `optimizer` entry of the model's file."""
    if state.precision == "fp32":
        return _torch_state(state.groups, host)
    scale = dict(state.loss_scale or {"cur_scale": 1.0, "dynamic": False})
    entries: dict[str, Any] = {
        "dynamic_loss_scale": bool(scale.get("dynamic", False)),
        "cur_scale": scale["cur_scale"],
        "cur_iter": scale.get("cur_iter", state.counters.global_steps),
        "last_overflow_iter": scale.get("last_overflow_iter", -1),
        "scale_factor": scale.get("scale_factor", 2.0),
        "scale_window": scale.get("scale_window", 1000),
        "clip_grad": state.clip or 0.0,
    }
    if not state.flat_masters:
        entries["optimizer_state_dict"] = _torch_state(state.groups, host)
        entries["fp32_groups"] = [
            [host.take(_of(group, "master", i)).view(group.shapes[i]) for i in range(len(group.names))]
            for group in state.groups
        ]
        return entries
    layouts = [ContiguousLayout(_numels(group, range(len(group.names))), 1, align=1) for group in state.groups]
    entries["fp32_groups_flat"] = [
        _flat(group, "master", layout, host) for group, layout in zip(state.groups, layouts, strict=True)
    ]
    entries["optimizer_state_dict"] = _flat_state(state.groups, layouts, host)
    uneven = {
        name: plain(scalars, f"the optimizer's state of {name}")
        for group in state.groups
        for name, scalars in zip(group.names, group.scalars, strict=True)
    }
    entries["parameter_scalars"] = uneven
    return entries


def sharded_by_group(state: TrainingState, host: Host) -> dict[str, Any]:
    """Stages 1 and 2: one flat tensor per group and kind, cut into equal parts."""
    layouts = [_block(group, state) for group in state.groups]
    paddings, masters, mappings = [], [], []
    for group, layout in zip(state.groups, layouts, strict=True):
        padding = min(max((group.rank + 1) * layout.shard_numel - layout.filled, 0), layout.shard_numel)
        master = _flat(group, "master", layout, host)
        paddings.append(padding)
        masters.append(master[: layout.shard_numel - padding])
        mappings.append(_mapping(group, layout))
    return {
        "dynamic_loss_scale": bool((state.loss_scale or {}).get("dynamic", False)),
        "overflow": state.overflow,
        **({} if state.clip is None else {"clip_grad": state.clip}),
        "base_optimizer_state": _flat_state(state.groups, layouts, host),
        "single_partition_of_fp32_groups": masters,
        "zero_stage": state.stage,
        "group_paddings": paddings,
        "param_alignment_paddings": [_gaps(group, layout) for group, layout in zip(state.groups, layouts, strict=True)],
        "partition_count": [layout.world for layout in layouts],
        "ds_version": __version__,
        "param_slice_mappings": mappings,
    }


def sharded_by_parameter(state: TrainingState, host: Host) -> dict[str, Any]:
    """Stage 3: one flat tensor per sub-group and kind, made of every parameter's own part."""
    states: dict[int, dict[str, Any]] = {}
    masters: list[Tensor] = []
    param_groups: list[dict[str, Any]] = []
    for group in state.groups:
        members = [index for index, shape in enumerate(group.shapes) if shape.numel()]
        places = []
        for part in sub_groups(group, members, state):
            layout = StripedLayout(_numels(group, part), _ranks(group, state))
            place = len(masters)
            places.append(place)
            masters.append(_flat(group, "master", layout, host, part))
            if entry := _flat_entry(group, layout, host, part):
                states[place] = entry
        param_groups.append({**plain(group.hyperparameters, "hyperparameters"), "params": places})
    return {
        "zero_stage": 3,
        "dynamic_loss_scale": bool((state.loss_scale or {}).get("dynamic", False)),
        "overflow": state.overflow,
        "partition_count": state.dp_size,
        "optimizer_state_dict": {"state": states, "param_groups": param_groups},
        "fp32_flat_groups": masters,
    }


def sub_groups(group: GroupState, members: Sequence[int], state: TrainingState) -> list[list[int]]:
    """Parameters in runs that end where they reach `sub_group_size` elements on a rank."""
    runs: list[list[int]] = [[]]
    local = 0
    for index in members:
        if local >= state.sub_group_size:
            runs.append([])
            local = 0
        runs[-1].append(index)
        local += -(-group.shapes[index].numel() // _ranks(group, state))
    return [run for run in runs if run]


def _ranks(group: GroupState, state: TrainingState) -> int:
    return state.dp_size if group.layout is None else group.world


def _torch_state(groups: Sequence[GroupState], host: Host) -> dict[str, Any]:
    """A torch optimizer's state dict, parameters numbered through all groups."""
    states: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    number = 0
    for group in groups:
        numbers = list(range(number, number + len(group.names)))
        for index, place in enumerate(numbers):
            entry = dict(plain(group.scalars[index], f"the optimizer's state of {group.names[index]}"))
            for kind in group.kinds:
                tensor = group.tensors[kind][index]
                if kind != "master" and tensor is not None:
                    same = tensor.numel() == group.shapes[index].numel()
                    entry[kind] = host.take(tensor).view(group.shapes[index]) if same else host.take(tensor)
            if entry:
                states[place] = entry
        param_groups.append({**plain(group.hyperparameters, "hyperparameters"), "params": numbers})
        number += len(numbers)
    return {"state": states, "param_groups": param_groups}


def _flat_state(groups: Sequence[GroupState], layouts: Sequence[ContiguousLayout], host: Host) -> dict[str, Any]:
    """A torch optimizer's state dict in which every group has one flat parameter."""
    entries = {place: _flat_entry(group, layouts[place], host) for place, group in enumerate(groups)}
    param_groups = [
        {**plain(group.hyperparameters, "hyperparameters"), "params": [place]} for place, group in enumerate(groups)
    ]
    return {"state": {place: entry for place, entry in entries.items() if entry}, "param_groups": param_groups}


def _flat_entry(
    group: GroupState, layout: ContiguousLayout | StripedLayout, host: Host, members: Sequence[int] | None = None
) -> dict[str, Any]:
    entry: dict[str, Any] = _common_scalars(group)
    for kind in group.kinds:
        if kind != "master":
            entry[kind] = _flat(group, kind, layout, host, members)
    return entry


def _common_scalars(group: GroupState) -> dict[str, Any]:
    """What a flat tensor says of all its parameters: the furthest of each number."""
    result: dict[str, Any] = {}
    for scalars in group.scalars:
        for key, value in plain(scalars, "the optimizer's state").items():
            if key not in result or (isinstance(value, (int, float, Tensor)) and value > result[key]):
                result[key] = value
    return result


def _flat(
    group: GroupState,
    kind: str,
    layout: ContiguousLayout | StripedLayout,
    host: Host,
    members: Sequence[int] | None = None,
) -> Tensor:
    """The rank's shard of a kind, padding included; `layout` is of the members only."""
    members = range(len(group.names)) if members is None else members
    parts, dtype = [], torch.float32
    for place, index in enumerate(members):
        tensor = group.tensors.get(kind, [None] * len(group.names))[index]
        if tensor is None and kind == "master":
            tensor = _of(group, kind, index)
        if tensor is not None:
            start, stop = layout.interval(place, group.rank)
            _check(group, kind, index, tensor, stop - start)
            parts.append((layout.position(place, group.rank), tensor.detach().reshape(-1)[: stop - start]))
            dtype = tensor.dtype
    return host.flat(parts, layout.shard_numel, dtype)


def _check(group: GroupState, kind: str, index: int, tensor: Tensor, wanted: int) -> None:
    if tensor.numel() < wanted:
        raise UsageError(
            f"{kind} of {group.names[index]} has {tensor.numel()} elements on rank {group.rank}, "
            f"which holds {wanted} of the parameter's {group.shapes[index].numel()}. Only states with one value per "
            "element can be sharded"
        )


def _of(group: GroupState, kind: str, index: int) -> Tensor:
    tensor = group.tensors.get(kind, [None] * len(group.names))[index]
    start, stop = group.interval(index)
    if tensor is None and start < stop:
        raise UsageError(
            f"{group.names[index]} has no {kind} on rank {group.rank}, which holds [{start}, {stop}) of it"
        )
    return torch.empty(0) if tensor is None else tensor


def _block(group: GroupState, state: TrainingState) -> ContiguousLayout:
    if isinstance(group.layout, ContiguousLayout):
        return group.layout
    if group.layout is None and state.dp_size == 1:
        return ContiguousLayout(_numels(group, range(len(group.names))), 1)
    raise UsageError(f"stage {state.stage} needs a Block layout over {state.dp_size} ranks, found {group.layout!r}")


def _numels(group: GroupState, members: Sequence[int]) -> tuple[int, ...]:
    return tuple(group.shapes[index].numel() for index in members)


def _gaps(group: GroupState, layout: ContiguousLayout) -> list[int]:
    """The padding after each parameter, none after the last."""
    kept = [index for index, numel in enumerate(layout.numels) if numel]
    ends = [layout.starts[index] + layout.numels[index] for index in kept]
    nexts = [layout.starts[index] for index in kept[1:]] + ends[-1:]
    return [follows - end for follows, end in zip(nexts, ends, strict=True)]


def _mapping(group: GroupState, layout: ContiguousLayout) -> OrderedDict[str, Mapping[str, int]]:
    result: OrderedDict[str, Mapping[str, int]] = OrderedDict()
    for index, name in enumerate(group.names):
        start, stop = layout.interval(index, group.rank)
        if start < stop:
            result[name] = address(stop - start, layout.position(index, group.rank))
    return result


_HOME = "deepspeed.runtime.fp16.loss_scaler"


def address(numel: int, start: int) -> OrderedDict[str, int]:
    """A stand-in for DeepSpeed's `fragment_address`."""
    result: OrderedDict[str, int] = OrderedDict()
    vars(result).update(numel=numel, start=start)
    return result


def scaler_stand_in(attributes: Mapping[str, Any] | None) -> OrderedDict[str, Any] | None:
    """A stand-in for a loss scaler; None where the factor is not a constant one."""
    if attributes is not None and (attributes.get("dynamic") or attributes.get("cur_scale", 1) != 1):
        return None
    result: OrderedDict[str, Any] = OrderedDict()
    vars(result).update(cur_scale=1.0, dynamic=False, scale_loss=torch.Tensor, update_scale=complex)
    return result


def scaler_attributes(scaler: Any) -> dict[str, Any] | None:
    """What a loss scaler in a file knows, whoever wrote it."""
    if scaler is None:
        return None
    found = dict(scaler) if type(scaler) is dict else dict(vars(scaler))
    found.pop("scale_loss", None)
    found.pop("update_scale", None)
    return found


@contextmanager
def _named_as_deepspeed_does() -> Iterator[None]:
    """The scalers' classes under the path where DeepSpeed has them, which is also an alias of ours."""
    classes: tuple[type, ...] = (LossScaler, DynamicLossScaler)
    ours = [kind.__module__ for kind in classes]
    try:
        for kind in classes:
            kind.__module__ = _HOME
        yield
    finally:
        for kind, module in zip(classes, ours, strict=True):
            kind.__module__ = module


def with_classes(entries: Mapping[str, Any], path: Path) -> None:
    """`torch.save` of an optimizer's file with its loss scaler as an object of DeepSpeed's class."""
    state = dict(entries["optimizer_state_dict"])
    attributes = state.get("loss_scale") or {"cur_scale": 1.0, "dynamic": False}
    scaler: LossScalerBase = object.__new__(DynamicLossScaler if attributes.get("dynamic") else LossScaler)
    vars(scaler).update(attributes)
    state["loss_scaler"] = scaler
    with _named_as_deepspeed_does():
        torch.save({**entries, "optimizer_state_dict": state}, path)
