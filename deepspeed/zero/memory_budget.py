"""The `memory` section at work: which states of this rank live in which tier."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.comm.discover import local_ranks
from deepspeed.config.schema import Schema
from deepspeed.memory.budget import DEVICE, MOMENTS, PARAMETERS, Spread, TierPlan, Widths, plan_states, show
from deepspeed.memory.tier import AT_HOME, Tier
from deepspeed.ops.moments import MomentKeeper
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.agreement import RankAgreement
from deepspeed.zero.parameters.sharding import numel_of
from deepspeed.zero.states.tiles import tiles_well, twin

_SAMPLE = (64, 64)  # of a parameter, to see what an optimizer keeps of one
_UNKNOWN = 8.0  # bytes per element of an optimizer that can only be asked by a step


@dataclass(frozen=True)
class Budgeted:
    """Where states live because not all of them may stay on the device."""

    own: TierPlan
    """Of this rank."""
    first: TierPlan
    """Of the first rank, which holds the most: all ranks place parameters, which they exchange, as it does."""

    @property
    def states(self) -> dict[Tier, int]:
        """Elements of masters, moments and gradients in each tier."""
        return _by_tier(self.own.elements(MOMENTS))

    @property
    def parameters(self) -> dict[Tier, int]:
        """Elements of chunks of stage 3 in each tier."""
        return _by_tier(self.first.elements(PARAMETERS))


def tile_of(schema: Schema) -> int:
    """Elements that are updated at a time away from the device."""
    zero = schema.zero_optimization
    return max(int(zero.sub_group_size), 1) if "sub_group_size" in zero.model_fields_set else AT_HOME.tile


def parameters_leave(schema: Schema, module: nn.Module, precision: Precision, axis: AxisGroup) -> bool:
    """True if the chunks of stage 3 do not fit into what states may take of the device."""
    limit, zero = schema.memory.device, schema.zero_optimization
    if limit is None or not zero.shards_parameters:
        return False
    numels = [numel_of(param) for param in module.parameters()]
    chunks = [-(-numel // axis.size) for numel in numels]
    lasting = [-(-numel // axis.size) * axis.size for numel in numels if numel <= _persistent(schema)]
    return (sum(chunks) + sum(lasting)) * precision.param.itemsize > limit


def budget(
    schema: Schema,
    module: nn.Module,
    precision: Precision,
    optimizer: Optimizer | None,
    axis: AxisGroup,
    agreement: RankAgreement,
) -> Budgeted | None:
    """The plan of the `memory` section, which rank 0 prints; None: everything stays on the device."""
    if schema.memory.device is None:
        return None
    ranks = int(agreement.exchange([local_ranks(axis.size)], "ranks of a machine").max())
    names = {id(param): name for name, param in module.named_parameters()}
    groups = [] if optimizer is None else [_trained(options, names) for options in optimizer.param_groups]
    trained = {name for group in groups for name, _ in group}
    frozen = [(name, numel_of(param)) for name, param in module.named_parameters() if name not in trained]
    widths = Widths(
        precision.param.itemsize,
        precision.accumulate.itemsize,
        0 if precision.master == precision.param else precision.master.itemsize,
        0 if optimizer is None else state_width(optimizer),
    )

    def plan(rank: int) -> TierPlan:
        spread = Spread(
            int(schema.zero_optimization.stage),
            axis.size,
            rank,
            gap=max(16 // precision.param.itemsize, 1) if schema.zero_optimization.parameter_alignment else 1,
            persistent=_persistent(schema),
        )
        section, tile = schema.memory, tile_of(schema)
        return plan_states(groups, spread, section, ranks=ranks, widths=widths, frozen=frozen, tile=tile)

    first = plan(0)
    if torch.distributed.get_rank() == 0:
        show(first)
    at_home = len(first.units) == 1 and first.tiers == (DEVICE,)
    return None if at_home else Budgeted(first if axis.rank == 0 else plan(axis.rank), first)


def state_width(optimizer: Optimizer) -> float:
    """Bytes per element of all that an optimizer keeps of a parameter."""
    if isinstance(optimizer, MomentKeeper):
        sample = torch.empty(_SAMPLE)
        return sum(dtype.itemsize * numel for _, dtype, numel in optimizer.state_layout(sample)) / sample.numel()
    if not tiles_well(optimizer):
        return _UNKNOWN
    return max((_tried(optimizer, place) for place in range(len(optimizer.param_groups))), default=0.0)


def _tried(optimizer: Optimizer, group: int) -> float:
    """What a step of a copy of the optimizer keeps of a sample in the place of a group's parameters."""
    sample = nn.Parameter(torch.zeros(_SAMPLE))
    sample.grad = torch.zeros(_SAMPLE)
    other = twin(optimizer)
    other.state = defaultdict(dict)
    for place, options in enumerate(other.param_groups):
        options["params"] = [sample] if place == group else []
    other.step()
    kept = [value for value in other.state[sample].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in kept if value.dim()) / sample.numel()


def _trained(options: dict[str, Any], names: dict[int, str]) -> list[tuple[str, int]]:
    trained = [param for param in options["params"] if param.requires_grad]
    return [(names.get(id(param), "a parameter outside the module"), numel_of(param)) for param in trained]


def _persistent(schema: Schema) -> int:
    """Elements of parameters that stay whole at stage 3."""
    return int(schema.zero_optimization.param_persistence_threshold)


def _by_tier(elements: dict[str, int]) -> dict[Tier, int]:
    return {Tier(tier): count for tier, count in elements.items()}
