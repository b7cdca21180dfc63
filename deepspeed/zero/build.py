"""From a config to what holds the states of a model: whole on every rank, or spread over ranks with all that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deepspeed.config.schema import Schema
from deepspeed.memory.tier import Homes
from deepspeed.ops.muon import MuonWithAuxAdam, SingleDeviceMuon
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.agreement import Hosts
from deepspeed.zero.birth.site import rank_device
from deepspeed.zero.budgeting import Budgeted
from deepspeed.zero.gradients.council import Council
from deepspeed.zero.gradients.reducer import ShardReducer
from deepspeed.zero.parameters.coordinator import Coordinator
from deepspeed.zero.parameters.gather import Gather, PlainGather, gather
from deepspeed.zero.parameters.hooks import ModuleHooks
from deepspeed.zero.parameters.housing import gather_from, remotes_of, reserve, uses_disk
from deepspeed.zero.parameters.passes import Passes
from deepspeed.zero.parameters.plan import Limits
from deepspeed.zero.parameters.remote import Remote, Remotes
from deepspeed.zero.parameters.shard import Shard, shard_of
from deepspeed.zero.parameters.sharding import persist, shard_module, shard_parameter
from deepspeed.zero.parameters.uses import blocks_of
from deepspeed.zero.placement import AxisOf, LiesOn, Placement, placed
from deepspeed.zero.public.export import meet_state_dicts
from deepspeed.zero.public.granularity import units_by_granularity
from deepspeed.zero.public.leaf import apply_zero_leaf_module_config, mark_expert_blocks, set_z3_leaf_module
from deepspeed.zero.states.deferral import Deferral
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup
from deepspeed.zero.states.housed import HousedGroup
from deepspeed.zero.states.housing import homes_of, store_of
from deepspeed.zero.states.late import runs_compiled, wait_in_modules
from deepspeed.zero.states.matrices import ShardedMatrices
from deepspeed.zero.states.norm import Measure
from deepspeed.zero.states.pace import Pace
from deepspeed.zero.states.planner import Planner
from deepspeed.zero.states.states import States
from deepspeed.zero.states.striped import StripedGroup
from deepspeed.zero.states.whole import WholePlanner

__all__ = ["Quarters", "Sharded", "hold_whole", "house", "quarters_of", "shard"]

_WORTHWHILE = 1 << 17  # elements that each rank sends in a gather ahead of small modules


@dataclass(frozen=True)
class Quarters:
    """Where states live, and the chunks of stage 3; what they need is closed with the stack."""

    homes: Homes
    remotes: Remotes | None
    hosts: Hosts
    stack: ExitStack


def quarters_of(schema: Schema, budgeted: Budgeted | None, hosts: Hosts, stack: ExitStack) -> Quarters:
    """As the config says: by its offload sections, or by its budgets."""
    homes, remotes = hosts.together(
        lambda: (homes_of(schema, budgeted, stack), remotes_of(schema, budgeted, stack)),
        "opening swap files",
        needed=uses_disk(schema),
    )
    return Quarters(homes, remotes, hosts, stack)


@dataclass(frozen=True)
class Sharded:
    """A model that is spread over ranks."""

    reducer: ShardReducer
    states: States | None
    names: dict[int, str]
    """The name of each parameter in the module, by id."""
    lies_on: LiesOn
    coordinator: Coordinator | None = None
    hooks: ModuleHooks | None = None
    remote: Remote | None = None
    """Where parameters live between their uses; None: on the device."""

    def extend(self, members: Sequence[Named]) -> None:
        """Make parameters that are new to the model ready to be spread."""
        self.names.update({id(param): name for name, param in members})
        if self.hooks is None:
            return
        for name, param in members:
            if shard_of(param) is None:
                shard_parameter(param, self.lies_on(param), name, self.remote).release()
        if self.hooks.handles:
            self.hooks.look_again()
        else:  # until now every parameter stayed whole
            self.hooks.install()
            self.leave_by_passes()

    def leave_by_passes(self) -> None:
        """Where parameters are gathered, let gradients leave by their passes: [Note: gradients leave by the plan]."""
        coordinator = self.coordinator
        if coordinator is not None and self.hooks is not None and self.hooks.handles:
            self.reducer.arrivals.clock = lambda: coordinator.position
            coordinator.send_with(self.reducer)


def house(
    schema: Schema,
    module: nn.Module,
    precision: Precision,
    optimizer: Optimizer,
    measure: Measure,
    alone: AxisGroup,
    quarters: Quarters,
) -> Sharded:
    """States that nobody shares, in another tier; `alone` is an axis on which this rank has no other."""
    planner = _planner(schema, module, precision, _whole(measure, alone), HousedGroup, quarters)
    return _states(planner, module, optimizer, measure, quarters)


def hold_whole(
    module: nn.Module, precision: Precision, optimizer: Optimizer, measure: Measure, alone: AxisGroup
) -> States:
    """The states of an optimizer that nobody shares; `alone` is an axis on which this rank has no other."""
    dtypes = Dtypes(precision.master, precision.accumulate, precision.reduce)
    names = {id(param): name for name, param in module.named_parameters()}
    planner = WholePlanner(_whole(measure, alone), dtypes, names)
    return States(optimizer, planner.groups, measure, waits=planner.waits)


def shard(
    schema: Schema,
    module: nn.Module,
    precision: Precision,
    optimizer: Optimizer | None,
    measure: Measure,
    quarters: Quarters,
) -> Sharded:
    """Spread `module` and the states of its optimizer as the config's stage says."""
    zero = schema.zero_optimization
    if zero.stage < 3:
        resting = placed(measure.ranks_of, lambda axis: Placement(axis, samples=measure.axis.size))
        planner = _planner(schema, module, precision, resting, None, quarters)
        return _states(planner, module, optimizer, measure, quarters)
    fetching = _fetching(schema, module, measure, quarters)
    coordinator, hooks = fetching
    make = partial(_striped, coordinator.gradient_arrived if hooks.handles else None)
    striped = placed(
        measure.ranks_of, lambda axis: Placement(axis, gradient_group=axis.twin(), samples=measure.axis.size)
    )
    # Groups are made by all ranks together, also by a stage of a pipeline that trains nothing.
    next((striped(param) for param in module.parameters() if measure.ranks_of(param) is measure.axis), None)
    planner = _planner(schema, module, precision, striped, make, quarters)
    sharded = _states(planner, module, optimizer, measure, quarters, fetching)
    return replace(sharded, remote=quarters.remotes.remote if quarters.remotes is not None else None)


def _whole(measure: Measure, alone: AxisGroup) -> AxisOf:
    """States that nobody shares: each rank that holds a parameter has all of them."""
    size = measure.axis.size
    return placed(measure.ranks_of, lambda axis: Placement(alone, replicate=axis, samples=size))


def _planner(
    schema: Schema,
    module: nn.Module,
    precision: Precision,
    axis_of: AxisOf,
    make: Callable[[Sequence[Named], Placement, Dtypes, dict[str, Any]], ShardGroup] | None,
    quarters: Quarters,
) -> Planner:
    names = {id(param): name for name, param in module.named_parameters()}
    return Planner(schema, axis_of, precision, names, precision.reduce_dtypes(module), make, quarters.homes)


def _states(
    planner: Planner,
    module: nn.Module,
    optimizer: Optimizer | None,
    measure: Measure,
    quarters: Quarters,
    fetching: tuple[Coordinator, ModuleHooks] | None = None,
) -> Sharded:
    coordinator, hooks = fetching or (None, None)
    hosts, stack = quarters.hosts, quarters.stack
    states = None
    if optimizer is not None:
        device = rank_device()[1]
        pace = Pace.of(
            planner.schema, 0 if coordinator is None else None, pinned=planner.homes.pinned, late=device.type != "cpu"
        )
        store = store_of(planner.schema, planner.homes, optimizer, stack)
        zenflow = planner.schema.zero_optimization.zenflow
        deferral = None if zenflow is None else Deferral(zenflow, optimizer)
        states = hosts.together(
            lambda: States(optimizer, planner.groups, measure, pace=pace, store=store, deferral=deferral),
            "taking space on the disk for the optimizer's states",
            needed=planner.homes.swap is not None,
        )
        stack.callback(states.close)
        if states.away:
            stack.callback(wait_in_modules(module))
            states.compiled = runs_compiled(module)
        if isinstance(optimizer, (SingleDeviceMuon, MuonWithAuxAdam)):
            optimizer.whole = ShardedMatrices(states.groups)
    reducer = ShardReducer(
        lambda: states.groups if states is not None else [],
        planner.reduction_of,
        planner.ways(measure.axis.size, blocks_of(module)[1]),
        Council(hosts),
        registered=module.parameters,
        passes=coordinator,
    )
    if states is not None:
        states.reducer = reducer
    sharded = Sharded(reducer, states, planner.names, measure.ranks_of, coordinator, hooks)
    sharded.leave_by_passes()
    return sharded


def _striped(
    arrived: Callable[[Shard], None] | None,
    members: Sequence[Named],
    placement: Placement,
    dtypes: Dtypes,
    options: dict[str, Any],
) -> ShardGroup:
    return StripedGroup(members, placement, dtypes, options, arrived=arrived)


def _fetching(
    schema: Schema, module: nn.Module, measure: Measure, quarters: Quarters
) -> tuple[Coordinator, ModuleHooks]:
    """Cut the parameters, and have modules gather what they need."""
    zero, axis = schema.zero_optimization, measure.axis
    apply_zero_leaf_module_config(module, zero.leaf_module)
    mark_expert_blocks(module)
    remotes, stack = quarters.remotes, quarters.stack
    hosts = quarters.hosts
    if remotes is not None:
        hosts.together(
            lambda: reserve(remotes, module, measure.ranks_of),
            "taking space on the disk for parameters",
            needed=uses_disk(schema),
        )
    shards = shard_module(module, measure.ranks_of, remotes)
    for each in shards:
        each.strict = zero.enable_sanity_checks
    if zero.module_granularity_threshold > 0:
        for unit in units_by_granularity(module, zero.module_granularity_threshold).values():
            set_z3_leaf_module(unit, True)
    way: Gather = PlainGather(by_all_reduce=zero.use_all_reduce_for_fetch_params, one_by_one=zero.allgather_sequential)
    far = way if remotes is None else gather_from(remotes.remote, way)
    for each in shards:
        each.gather = way if each.remote is None else far
    total = int(zero.model_persistence_threshold) // axis.size
    gather(persist(shards, int(zero.param_persistence_threshold), total))
    passes = Passes(
        hosts,
        Limits(
            ahead=_ahead(schema, module, axis.size),
            live=int(zero.max_live_parameters),
            reuse=int(zero.max_reuse_distance),
        ),
        between_passes="max_reuse_distance" in zero.model_fields_set,
        log_traces=zero.log_trace_cache_warnings,
    )
    coordinator = Coordinator(passes)
    hooks = ModuleHooks(module, coordinator)
    stack.callback(hooks.remove)
    hooks.install()
    stack.callback(meet_state_dicts(module))
    return coordinator, hooks


def _ahead(schema: Schema, module: nn.Module, size: int) -> int:
    """Elements that are gathered ahead: as the config says, else one block, or what makes a worthwhile message."""
    zero = schema.zero_optimization
    if zero.allgather_sequential:
        return 0
    ahead = int(zero.prefetch_bucket_size)
    if "prefetch_bucket_size" in zero.model_fields_set:
        return ahead
    return max(min(ahead, _WORTHWHILE * size), blocks_of(module)[1])
