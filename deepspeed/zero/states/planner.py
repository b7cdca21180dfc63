"""From a config and an optimizer to groups: which parameters are spread together, and how they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.fragments import round_robin
from deepspeed.memory.tier import AT_HOME, Homes
from deepspeed.precision.policy import Precision
from deepspeed.zero.gradients.reducer import Ways
from deepspeed.zero.gradients.reduction import Reduction, ToOwners, Weights
from deepspeed.zero.parameters.sharding import numel_of
from deepspeed.zero.placement import AxisOf, Placement
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup, name_of
from deepspeed.zero.states.resident import ResidentGroup

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

__all__ = ["Planner"]

# Elements of a bucket that the user did not size: a block, or enough for each rank's slice to be worth a message; few
# enough to be on their way early, and bounded, since a few such buckets are in memory whatever the number of ranks.
_BUCKET = 8 << 20
_BUCKET_PER_RANK = 1 << 19
_BUCKET_MOST = 32 << 20
_BLOCK_MOST = 256 << 20


@dataclass(frozen=True)
class Planner:
    """Makes the groups of one optimizer group's parameters."""

    schema: Schema
    axis_of: AxisOf
    precision: Precision
    names: dict[int, str]
    """The name of each parameter in the module, by id."""
    travels: dict[nn.Parameter, torch.dtype]
    """Parameters whose gradients travel in a dtype of their own."""
    make: Callable[[Sequence[Named], Placement, Dtypes, dict[str, Any]], ShardGroup] | None = None
    """How a group of parameters that do not stay whole is made; None keeps all whole."""
    homes: Homes = AT_HOME
    """Where states live."""
    reductions: dict[Placement, Reduction] = field(default_factory=dict)
    """One for each placement, so that its parameters share buckets."""

    def groups(self, options: dict[str, Any], params: list[nn.Parameter]) -> list[ShardGroup]:
        """Groups of one dtype and device each, in the order in which the parameters come."""
        kinds: dict[Any, list[Named]] = {}
        for param in params:
            if numel_of(param) == 0:
                continue
            kind = self.axis_of(param), self.dtypes(param), param.dtype, param.device
            kinds.setdefault(kind, []).append((name_of(param, self.names), param))
        make = self.make or self._resident
        return [make(self._ordered(members, kind[0]), kind[0], kind[1], options) for kind, members in kinds.items()]

    def reduction_of(self, group: ShardGroup) -> Reduction:
        """How the gradients of a group get to their owners."""
        zero, placement = self.schema.zero_optimization, group.placement
        if placement not in self.reductions:
            self.reductions[placement] = ToOwners(
                placement.shard,
                placement.group,
                Weights.of(self.schema, placement.size),
                placement.replicate,
                everywhere=not zero.reduce_scatter,
                merged=zero.use_multi_rank_bucket_allreduce,
            )
        return self.reductions[placement]

    def ways(self, size: int, block: int) -> Ways:
        """How gradients leave where `size` ranks share them; a `block` of the model has so many elements."""
        zero = self.schema.zero_optimization
        given = "reduce_bucket_size" in zero.model_fields_set
        limit = min(max(_BUCKET, _BUCKET_PER_RANK * size), _BUCKET_MOST)
        limit = zero.reduce_bucket_size if given else max(limit, min(block + block // 64, _BLOCK_MOST))
        return Ways(
            # Gradients that wait on the parameters of stage 1 would be added up in the parameters' dtype.
            every_backward=zero.stage >= 2 or self.precision.accumulate != self.precision.param or self.homes.away,
            strict=given,
            limit=int(limit) if zero.contiguous_gradients else 1,
            # At stage 3 a rank that waits for gradients would not serve those that still need its parameters.
            overlap=zero.overlap_comm is not False or zero.stage == 3,
            early=not (zero.overlap_comm is False and zero.stage == 3),
        )

    def dtypes(self, param: nn.Parameter) -> Dtypes:
        """In what this parameter's states are held and travel."""
        precision, kept = self.precision, param.dtype == torch.float32 and self.precision.param != torch.float32
        reduce = self.travels.get(param, param.dtype if kept else precision.reduce)
        accumulate = param.dtype if kept else precision.accumulate
        master = precision.master if param.is_floating_point() else param.dtype
        homes = self.homes if param.is_floating_point() else AT_HOME
        return Dtypes(master, accumulate, reduce, homes, kept=not self.schema.optimizer_in_backward.enabled)

    def _ordered(self, members: list[Named], placement: Placement) -> list[Named]:
        if not self.schema.zero_optimization.round_robin_gradients:
            return members
        return [members[place] for place in round_robin(range(len(members)), placement.shard.size)]

    def _resident(
        self, members: Sequence[Named], placement: Placement, dtypes: Dtypes, options: dict[str, Any]
    ) -> ShardGroup:
        zero = self.schema.zero_optimization
        return ResidentGroup(
            members,
            placement,
            dtypes,
            options,
            gather_limit=int(zero.allgather_bucket_size) or 1,
            aligned=zero.parameter_alignment,
        )
