"""From a config and an optimizer to groups: which parameters are spread together, and how they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.fragments import round_robin
from deepspeed.memory.tier import ON_DEVICE, StateTiers
from deepspeed.precision.policy import Precision
from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.parameters.sharding import numel_of
from deepspeed.zero.placement import AxisOf, Placement
from deepspeed.zero.states.groups import Dtypes, Named, ShardGroup, WholeGroup, name_of

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

Make = Callable[[Sequence[Named], Placement, Dtypes, dict[str, Any]], ShardGroup]
"""Makes a group of parameters of one dtype and one placement, with the options of the optimizer."""


@dataclass(frozen=True)
class GroupPlanner:
    """Makes the groups of one optimizer group's parameters, and their reductions."""

    schema: Schema
    axis_of: AxisOf
    precision: Precision
    names: dict[int, str]
    """The name of each parameter in the module, by id."""
    travels: dict[nn.Parameter, torch.dtype]
    """Parameters whose gradients travel in a dtype of their own."""
    make_reduction: Callable[[Placement, int], Reduction]
    """For a placement, and gradients of which only touched rows of so many elements travel; 0: all of it."""
    make: Make | None = None
    """How a group is made; None: what the optimizer updates are the parameters themselves, or whole masters."""
    tiers: StateTiers = ON_DEVICE
    """Where states live."""
    apart: Callable[[nn.Parameter], bool] = lambda _: False
    """Parameters of which it says otherwise than of others have groups of their own."""
    rows: dict[int, int] = field(default_factory=dict)
    """How long the rows are of parameters of which only touched ones travel, by id."""
    reductions: dict[Placement, Reduction] = field(default_factory=dict)
    """One for each placement, so that its parameters share buckets."""
    by_rows: dict[tuple[Placement, int], Reduction] = field(default_factory=dict)
    """One for each placement and length of rows."""
    whole: dict[tuple[int, Placement], WholeGroup] = field(default_factory=dict)
    """Those that were made without `make`, by the id of their options."""

    def groups(self, options: dict[str, Any], params: list[nn.Parameter]) -> list[ShardGroup]:
        """Groups of one dtype and device each, in the order in which the parameters come."""
        if self.make is None:
            return self._whole_groups(options, params)
        kinds: dict[Any, list[Named]] = {}
        for param in params:
            if numel_of(param) == 0:
                continue
            kind = self.axis_of(param), self.dtypes(param), param.dtype, param.device, self.apart(param)
            kinds.setdefault(kind, []).append((name_of(param, self.names), param))
        return [self.make(self._ordered(each, kind[0]), kind[0], kind[1], options) for kind, each in kinds.items()]

    def _whole_groups(self, options: dict[str, Any], params: list[nn.Parameter]) -> list[ShardGroup]:
        """The groups of these options, one for each placement; parameters that are unfrozen later join them."""
        kinds: dict[Placement, list[Named]] = {}
        for param in params:
            kinds.setdefault(self.axis_of(param), []).append((name_of(param, self.names), param))
        if not params:  # a group without parameters is listed, too, as one of which nothing is special
            kinds[self.axis_of(nn.Parameter(torch.empty(0)))] = []
        dtypes = Dtypes(self.precision.master, self.precision.accumulate, self.precision.reduce)
        for placement, members in kinds.items():
            known = self.whole.get((id(options), placement))
            if known is None:
                self.whole[id(options), placement] = WholeGroup(members, placement, dtypes, options)
            else:
                known.extend(members)
        return [self.whole[id(options), placement] for placement in kinds]

    def waits(self, param: nn.Parameter) -> bool:
        """Whether a frozen parameter enters when it is unfrozen; it gets a copy in another dtype only then."""
        return self.make is not None or (param.is_floating_point() and param.dtype != self.precision.master)

    def reduction_of(self, placement: Placement, param: nn.Parameter | None) -> Reduction:
        """How the gradients of a placement are reduced, or the gradient of this parameter."""
        width = self.rows.get(id(param), 0)
        if width:
            if (placement, width) not in self.by_rows:
                self.by_rows[placement, width] = self.make_reduction(placement, width)
            return self.by_rows[placement, width]
        if placement not in self.reductions:
            self.reductions[placement] = self.make_reduction(placement, 0)
        return self.reductions[placement]

    def dtypes(self, param: nn.Parameter) -> Dtypes:
        """In what this parameter's states are held and travel."""
        precision, kept = self.precision, param.dtype == torch.float32 and self.precision.param != torch.float32
        reduce = self.travels.get(param, param.dtype if kept else precision.reduce)
        accumulate = param.dtype if kept else precision.accumulate
        master = precision.master if param.is_floating_point() else param.dtype
        tiers = self.tiers if param.is_floating_point() else ON_DEVICE
        return Dtypes(master, accumulate, reduce, tiers, kept=not self.schema.optimizer_in_backward.enabled)

    def _ordered(self, members: list[Named], placement: Placement) -> list[Named]:
        if not self.schema.zero_optimization.round_robin_gradients:
            return members
        return [members[place] for place in round_robin(range(len(members)), placement.shard.size)]
