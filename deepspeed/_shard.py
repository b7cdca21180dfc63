"""The part of the composition root that spreads a model over ranks: config → shards, hooks, reducer, states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deepspeed.config.schema import Schema
from deepspeed.ops.muon import MuonWithAuxAdam, SingleDeviceMuon
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.gradients.reducer import ShardReducer
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.agreement import Control
from deepspeed.zero.parameters.coordinator import Coordinator
from deepspeed.zero.parameters.gather import Fetcher
from deepspeed.zero.parameters.hooks import ModuleHooks
from deepspeed.zero.parameters.plan import Limits
from deepspeed.zero.parameters.shard import Shard, shard_of
from deepspeed.zero.parameters.sharding import persist, shard_module, shard_parameter
from deepspeed.zero.public.export import tell_of_empty_state_dicts
from deepspeed.zero.public.granularity import units_by_granularity
from deepspeed.zero.public.leaf import apply_zero_leaf_module_config, set_z3_leaf_module
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup
from deepspeed.zero.states.matrices import ShardedMatrices
from deepspeed.zero.states.planner import Planner, manner
from deepspeed.zero.states.sharded import Measure, ShardedStates
from deepspeed.zero.states.striped import StripedGroup

__all__ = ["Sharded", "shard"]


@dataclass(frozen=True)
class Sharded:
    """A model that is spread over the ranks of an axis."""

    reducer: ShardReducer
    states: ShardedStates | None
    names: dict[int, str]
    """The name of each parameter in the module, by id."""
    axis: AxisGroup
    coordinator: Coordinator | None = None
    hooks: ModuleHooks | None = None

    def extend(self, members: Sequence[Named]) -> None:
        """Make parameters that are new to the model ready to be spread."""
        self.names.update({id(param): name for name, param in members})
        if self.hooks is None:
            return
        for name, param in members:
            if shard_of(param) is None:
                shard_parameter(param, self.axis, name).release()
        if self.hooks.handles:
            self.hooks.look_again()
        else:  # until now every parameter stayed whole
            self.hooks.install()


def shard(
    schema: Schema,
    module: nn.Module,
    precision: Precision,
    optimizer: Optimizer | None,
    measure: Measure,
    stack: ExitStack,
) -> Sharded:
    """Spread `module` and the states of its optimizer as the config's stage says."""
    zero, axis = schema.zero_optimization, measure.axis
    names = {id(param): name for name, param in module.named_parameters()}
    planner = Planner(schema, axis, precision, names, precision.reduce_dtypes(module))
    if zero.stage < 3:
        return _states(planner, optimizer, measure)
    coordinator, hooks = _fetching(schema, module, axis, stack)
    arrived = coordinator.gradient_arrived if hooks.handles else None
    make = partial(_striped, axis, axis.twin(), arrived)
    planner = Planner(schema, axis, precision, names, planner.travels, make)
    return _states(planner, optimizer, measure, coordinator, hooks)


def _states(
    planner: Planner,
    optimizer: Optimizer | None,
    measure: Measure,
    coordinator: Coordinator | None = None,
    hooks: ModuleHooks | None = None,
) -> Sharded:
    states = None
    if optimizer is not None:
        states = ShardedStates(
            optimizer,
            planner.groups,
            measure,
            meet=coordinator.step if coordinator else None,
            tile_numel=int(planner.schema.zero_optimization.sub_group_size) if coordinator else 0,
        )
        if isinstance(optimizer, (SingleDeviceMuon, MuonWithAuxAdam)):
            optimizer.whole = ShardedMatrices(states.groups)
    reducer = ShardReducer(
        lambda: states.groups if states is not None else [],
        manner(planner.schema, measure.axis.size),
        enter=coordinator.begin_backward if coordinator else None,
        leave=coordinator.end_backward if coordinator else None,
    )
    if states is not None:
        states.reducer = reducer
    return Sharded(reducer, states, planner.names, measure.axis, coordinator, hooks)


def _striped(
    axis: AxisGroup,
    lane: Any,
    arrived: Callable[[Shard], None] | None,
    members: Sequence[Named],
    dtypes: Dtypes,
    options: dict[str, Any],
) -> ShardGroup:
    return StripedGroup(members, axis, dtypes, options, lane=lane, arrived=arrived)


def _fetching(schema: Schema, module: nn.Module, axis: AxisGroup, stack: ExitStack) -> tuple[Coordinator, ModuleHooks]:
    """Cut the parameters, and have modules gather what they need."""
    zero = schema.zero_optimization
    apply_zero_leaf_module_config(module, zero.leaf_module)
    shards = shard_module(module, axis)
    for each in shards:
        each.strict = zero.enable_sanity_checks
    if zero.module_granularity_threshold > 0:
        for unit in units_by_granularity(module, zero.module_granularity_threshold).values():
            set_z3_leaf_module(unit, True)
    total = int(zero.model_persistence_threshold) // axis.size
    fetch.gather(persist(shards, int(zero.param_persistence_threshold), total))
    coordinator = Coordinator(
        Control(axis),
        Fetcher(by_all_reduce=zero.use_all_reduce_for_fetch_params, one_by_one=zero.allgather_sequential),
        Limits(
            ahead=0 if zero.allgather_sequential else int(zero.prefetch_bucket_size),
            live=int(zero.max_live_parameters),
            reuse=int(zero.max_reuse_distance),
        ),
        between_passes="max_reuse_distance" in zero.model_fields_set,
        log_traces=zero.log_trace_cache_warnings,
    )
    hooks = ModuleHooks(module, coordinator)
    stack.callback(hooks.remove)
    hooks.install()
    stack.callback(tell_of_empty_state_dicts(module))
    return coordinator, hooks
