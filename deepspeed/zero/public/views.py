"""Attributes of DeepSpeed's own ZeRO optimizers, computed when they are read. Nothing inside reads these.

What is flat there lies in pieces here, so that most views are copies: good for looking, without effect when written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.fragments import ContiguousLayout
from deepspeed.zero.parameters.shard import shard_of
from deepspeed.zero.states.groups import ShardGroup
from deepspeed.zero.states.states import OptimizerStates

partitioned_param_data_shape = [0]
"""The shape of a sharded parameter that is not in use."""


def find(name: str) -> Callable[[OptimizerStates, Optimizer], Any] | None:
    """How to compute an attribute from the states and the optimizer; None if there is no such attribute."""
    if name in _OF_EACH_GROUP:
        compute = _OF_EACH_GROUP[name]
        return lambda states, optimizer: [compute(group) for group in states.groups]
    return _OF_ALL.get(name)


def _gradients(states: OptimizerStates, optimizer: Optimizer) -> dict[int, list[Tensor]]:
    """Per group this rank's gradients that the next step uses, still with the loss scale; empty where there are none.

    They are there between the reduction and the step.
    """
    if states.reducer is not None:
        states.reducer.wait()
    found = enumerate(group.gradients() for group in states.groups)
    kept = {number: [g.reshape(-1) for g in grads if g is not None] for number, grads in found}
    return {number: grads for number, grads in kept.items() if grads}


def _owners(states: OptimizerStates, optimizer: Optimizer) -> dict[int, int]:
    """Our group → the optimizer's."""
    places = {id(options): place for place, options in enumerate(optimizer.param_groups)}
    return {number: places[id(group.options)] for number, group in enumerate(states.groups)}


def _lasting(states: OptimizerStates, optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters that stay whole between uses."""
    shards = [shard_of(param) for group in states.groups for param in group.params]
    return [shard.param for shard in shards if shard is not None and shard.persistent]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def _chunks(group: ShardGroup) -> list[Tensor]:
    """This rank's part of each parameter, in the model's dtype."""
    return [_chunk(group, place) for place in range(len(group.params))]


def _chunk(group: ShardGroup, place: int) -> Tensor:
    shard = shard_of(group.params[place])
    if shard is not None:
        return shard.data
    start, stop = group.layout.interval(place, group.axis.rank)
    return group.params[place].detach().reshape(-1)[start:stop]


def _flat(group: ShardGroup) -> Tensor:
    """The masters of this rank, each where the layout has it."""
    if not group.params:
        return torch.zeros(0)
    flat = torch.zeros(group.layout.shard_numel, dtype=group.dtypes.master, device=group.params[0].device)
    pieces = {id(piece.param): piece for piece in group.pieces}
    for place, param in enumerate(group.params):
        piece = pieces.get(id(param))
        if piece is not None:
            at = group.layout.position(place, group.axis.rank)
            flat[at : at + piece.master.numel()] = piece.master.detach().reshape(-1)
    return flat


def _concatenated(group: ShardGroup) -> Tensor:
    """All parameters of a group, where the layout has them; only where they stay whole."""
    layout = group.layout
    if not isinstance(layout, ContiguousLayout):
        raise AttributeError("at stage 3 parameters do not stay whole, so there is no flat tensor of them")
    if not group.params:
        return torch.zeros(0)
    flat = torch.zeros(layout.padded, dtype=group.params[0].dtype, device=group.params[0].device)
    for start, param in zip(layout.starts, group.params, strict=True):
        flat[start : start + param.numel()] = param.detach().reshape(-1)
    return flat


_OF_EACH_GROUP: dict[str, Callable[[ShardGroup], Any]] = {
    "bit16_groups": lambda group: list(group.params),
    "bit16_groups_flat": _concatenated,
    "fp16_groups": lambda group: list(group.params),
    "fp16_partitioned_groups": _chunks,
    "fp16_partitioned_groups_flat": lambda group: _joined(_chunks(group)),
    "fp32_partitioned_groups_flat": _flat,
    "groups_padding": lambda g: g.layout.shard_numel - sum(piece.master.numel() for piece in g.pieces),
    "parallel_partitioned_bit16_groups": lambda group: list(_concatenated(group).view(group.axis.size, -1)),
    "params_in_partition": lambda group: [piece.param for piece in group.pieces],
    "partition_count": lambda group: group.axis.size,
    "single_partition_of_fp32_groups": _flat,
}

_OF_ALL: dict[str, Callable[[OptimizerStates, Optimizer], Any]] = {
    "averaged_gradients": _gradients,
    "grad_partitions_flat_buffer": lambda *of: _joined([*chain.from_iterable(_gradients(*of).values())]),
    "persistent_parameters": _lasting,
    "sub_group_to_group_id": _owners,
}
