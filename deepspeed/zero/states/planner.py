"""From a config and an optimizer to groups: which parameters are spread together, and how they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.fragments import round_robin
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.gradients.reducer import Manner
from deepspeed.zero.parameters.sharding import numel_of
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup
from deepspeed.zero.states.resident import ResidentGroup

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

__all__ = ["Planner", "manner"]

# A bucket that the user did not size: large enough for full bandwidth, small enough to be on its way early.
_BUCKET = 8 << 20
_BUCKET_PER_RANK = 1 << 19


def manner(schema: Schema, size: int) -> Manner:
    """How gradients are reduced over `size` ranks."""
    zero = schema.zero_optimization
    given = "reduce_bucket_size" in zero.model_fields_set
    limit = zero.reduce_bucket_size if given else max(_BUCKET, _BUCKET_PER_RANK * size)
    whole = 1.0 / size if schema.gradient_allreduce_op == "mean" else 1.0
    before, after = 1.0 / schema.gradient_predivide_factor, schema.gradient_predivide_factor * whole
    if schema.prescale_gradients:
        before, after = whole, 1.0
    return Manner(
        eager=zero.stage >= 2,
        limit=int(limit) if zero.contiguous_gradients else 1,
        before=before,
        after=after,
        # At stage 3 a rank that waits for gradients would not serve those that still need its parameters.
        overlap=zero.overlap_comm is not False or zero.stage == 3,
        deferred=zero.overlap_comm is False and zero.stage == 3,
        everywhere=not zero.reduce_scatter,
        merged=zero.use_multi_rank_bucket_allreduce,
    )


@dataclass(frozen=True)
class Planner:
    """Makes the groups of one optimizer group's parameters."""

    schema: Schema
    axis: AxisGroup
    precision: Precision
    names: dict[int, str]
    """The name of each parameter in the module, by id."""
    travels: dict[nn.Parameter, torch.dtype]
    """Parameters whose gradients travel in a dtype of their own."""
    make: Callable[[Sequence[Named], Dtypes, dict[str, Any]], ShardGroup] | None = None
    """How a group of parameters that do not stay whole is made; None keeps all whole."""

    def groups(self, options: dict[str, Any], params: list[nn.Parameter]) -> list[ShardGroup]:
        """Groups of one dtype and device each, in the order in which the parameters come."""
        kinds: dict[Any, list[Named]] = {}
        for param in params:
            if numel_of(param) == 0:
                continue
            name = self.names.get(id(param), f"parameter outside the module, shape {tuple(param.shape)}")
            kinds.setdefault((self.dtypes(param), param.dtype, param.device), []).append((name, param))
        make = self.make or self._resident
        return [make(self._ordered(members), kind[0], options) for kind, members in kinds.items()]

    def dtypes(self, param: nn.Parameter) -> Dtypes:
        """In what this parameter's states are held and travel."""
        precision, kept = self.precision, param.dtype == torch.float32 and self.precision.param != torch.float32
        reduce = self.travels.get(param, param.dtype if kept else precision.reduce)
        accumulate = param.dtype if kept else precision.accumulate
        return Dtypes(precision.master if param.is_floating_point() else param.dtype, accumulate, reduce)

    def _ordered(self, members: list[Named]) -> list[Named]:
        if not self.schema.zero_optimization.round_robin_gradients:
            return members
        return [members[place] for place in round_robin(range(len(members)), self.axis.size)]

    def _resident(self, members: Sequence[Named], dtypes: Dtypes, options: dict[str, Any]) -> ShardGroup:
        zero = self.schema.zero_optimization
        return ResidentGroup(
            members,
            self.axis,
            dtypes,
            options,
            gather_limit=int(zero.allgather_bucket_size) or 1,
            aligned=zero.parameter_alignment,
        )
