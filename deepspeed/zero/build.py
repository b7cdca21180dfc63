"""From a config to what holds the states of a model and reduces its gradients, whole or spread over ranks.

Placements are made here, and so are reductions and gathers: a codec is another object of `make_reduction`,
`make_gather` or `make_block_gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.memory.tier import StateTiers
from deepspeed.ops.muon import MuonWithAuxAdam, SingleDeviceMuon
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.agreement import RankAgreement
from deepspeed.zero.birth.placement import rank_device
from deepspeed.zero.gradients import replicated
from deepspeed.zero.gradients.reducer import GradientReducer, ReductionSettings
from deepspeed.zero.gradients.reduction import ReduceToOwners, Reduction, ReductionWeights
from deepspeed.zero.gradients.sparse import embedding_parameters
from deepspeed.zero.memory_budget import Budgeted
from deepspeed.zero.offload import gather_from, remotes_of, reserve, store_of, tiers_of, uses_disk
from deepspeed.zero.parameters.coordinator import FetchCoordinator
from deepspeed.zero.parameters.fetch_plan import FetchLimits
from deepspeed.zero.parameters.fetch_schedule import FetchSchedule
from deepspeed.zero.parameters.gather import BlockGather, FlatBlocks, Gather, PlainGather, gather
from deepspeed.zero.parameters.module_hooks import ModuleHooks
from deepspeed.zero.parameters.offloaded import ChunkTier, ChunkTiers
from deepspeed.zero.parameters.parameter import shard_parameter
from deepspeed.zero.parameters.shard import Shard, shard_of
from deepspeed.zero.parameters.sharding import keep_whole, persist, shard_module
from deepspeed.zero.parameters.uses import blocks_of
from deepspeed.zero.placement import AxisOf, LiesOn, Placement, placed
from deepspeed.zero.public.export import meet_state_dicts
from deepspeed.zero.public.leaf import (
    apply_zero_leaf_module_config,
    mark_expert_blocks,
    set_z3_leaf_module,
    units_by_granularity,
)
from deepspeed.zero.states.groups import BlockGroup, Named, OffloadedGroup, StripedGroup
from deepspeed.zero.states.late_parameters import runs_compiled, wait_in_modules
from deepspeed.zero.states.matrices import ShardedMatrices
from deepspeed.zero.states.norm import NormRanks
from deepspeed.zero.states.planner import GroupPlanner, Make
from deepspeed.zero.states.states import OptimizerStates
from deepspeed.zero.states.tiles import StepTiling
from deepspeed.zero.states.zenflow import DeferredUpdates

_WORTHWHILE = 1 << 17  # elements that each rank sends in a gather ahead of small modules
# Elements of a bucket that the user did not size: a block, or enough for each rank's slice to be worth a message; few
# enough to be on their way early, and bounded, since a few such buckets are in memory whatever the number of ranks.
_BUCKET = 8 << 20
_BUCKET_PER_RANK = 1 << 19
_BUCKET_MOST = 32 << 20
_BLOCK_MOST = 256 << 20


def make_reduction(schema: Schema, placement: Placement) -> Reduction:
    """How the gradients of a placement are summed and get to their owners."""
    zero = schema.zero_optimization
    return ReduceToOwners(
        placement.shard,
        placement.group,
        ReductionWeights.of(schema, placement.size),
        placement.replicate,
        everywhere=not zero.reduce_scatter,
        merged=zero.use_multi_rank_bucket_allreduce,
    )


def make_gather(schema: Schema, remote: ChunkTier | None = None) -> Gather[Shard]:
    """How parameters that are cut become whole, from the device or from where their chunks live."""
    zero = schema.zero_optimization
    way = PlainGather(by_all_reduce=zero.use_all_reduce_for_fetch_params, one_by_one=zero.allgather_sequential)
    return way if remote is None else gather_from(remote, way)


def make_block_gather(schema: Schema) -> Gather[FlatBlocks]:
    """How updated blocks of whole parameters get to all ranks."""
    return BlockGather(int(schema.zero_optimization.allgather_bucket_size) or 1)


@dataclass(frozen=True)
class StatePlacement:
    """Where states live, and the chunks of stage 3; what they need is closed with the stack."""

    tiers: StateTiers
    remotes: ChunkTiers | None
    agreement: RankAgreement
    stack: ExitStack


def state_placement(
    schema: Schema, budgeted: Budgeted | None, agreement: RankAgreement, stack: ExitStack
) -> StatePlacement:
    """As the config says: by its offload sections, or by its budgets."""
    tiers, remotes = agreement.run_together(
        lambda: (tiers_of(schema, budgeted, stack), remotes_of(schema, budgeted, stack)),
        "opening swap files",
        needed=uses_disk(schema),
    )
    return StatePlacement(tiers, remotes, agreement, stack)


@dataclass(frozen=True)
class ZeroModel:
    """The states of a model and what moves its gradients and parameters, whole or spread over ranks."""

    reducer: GradientReducer
    states: OptimizerStates | None
    names: dict[int, str]
    """The name of each parameter in the module, by id."""
    lies_on: LiesOn
    coordinator: FetchCoordinator | None = None
    hooks: ModuleHooks | None = None
    remote: ChunkTier | None = None
    """Where parameters live between their uses; None: on the device."""
    reductions: Mapping[Placement, Reduction] = field(default_factory=dict)
    """How gradients are reduced, in the order in which placements were first used."""

    def reduction_states(self) -> dict[str, dict[str, Tensor]]:
        """What reductions remember from step to step, by their numbers; empty if nothing."""
        states = {str(number): each.state_dict() for number, each in enumerate(self.reductions.values())}
        return {number: state for number, state in states.items() if state}

    def load_reduction_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what `reduction_states` gave on the same rank of as many."""
        for number, each in enumerate(self.reductions.values()):
            if str(number) in states:
                each.load_state_dict(states[str(number)])

    def close(self) -> None:
        """Remove every hook, and let go of what reductions hold."""
        self.reducer.close()
        for each in self.reductions.values():
            each.close()

    def extend(self, members: Sequence[Named]) -> None:
        """Make parameters that are new to the model ready to be spread."""
        self.names.update({id(param): name for name, param in members})
        if self.reducer.replicated is not None:
            self.reducer.replicated.add(members)
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
            self.reducer.arrivals.clock = lambda: coordinator.schedule.position
            coordinator.schedule.departing = self.reducer


def hold_model_states(
    schema: Schema,
    module: nn.Module,
    precision: Precision,
    optimizer: Optimizer | None,
    measure: NormRanks,
    alone: AxisGroup,
    placement: StatePlacement,
) -> ZeroModel:
    """Hold the states of a model as the config's stage says; `alone` is an axis on which this rank has no other."""
    zero, size = schema.zero_optimization, measure.axis.size
    if zero.stage > 0 and (size > 1 or placement.remotes is not None):
        _refuse_torch_muon(optimizer)
    make_planner = partial(_planner, schema, module, precision, placement.tiers)
    if zero.stage == 3 and (size > 1 or placement.remotes is not None):
        return _shard_parameters(schema, module, optimizer, measure, placement, make_planner)
    if size > 1 and zero.stage > 0 and optimizer is not None:
        placements = placed(measure.ranks_of, lambda axis: Placement(axis, samples=size))
        resident = partial(BlockGroup, gather=make_block_gather(schema), aligned=zero.parameter_alignment)
        return _taken(make_planner(placements, resident), module, optimizer, measure, placement)
    if zero.stage == 3:
        keep_whole(module, measure.axis)
    placements = placed(measure.ranks_of, lambda axis: Placement(alone, replicate=axis, samples=size))
    in_buckets = schema.optimizer_in_backward.enabled and size > 1  # gradients that are used up as they land
    if optimizer is not None and (placement.tiers.away or zero.offloads_optimizer or in_buckets):
        return _taken(make_planner(placements, OffloadedGroup), module, optimizer, measure, placement)
    return _in_place(make_planner(placements, None), module, optimizer, measure)


def _refuse_torch_muon(optimizer: Optimizer | None) -> None:
    """It computes with whole matrices, and knows no way to have them gathered."""
    kind = getattr(torch.optim, "Muon", None)
    if kind is not None and isinstance(optimizer, kind):
        raise DeepSpeedConfigError(
            "zero_optimization.stage: torch.optim.Muon computes with whole matrices, but from stage 1 on an optimizer "
            "gets this rank's part of each parameter as a 1-D tensor. Use optimizer.type Muon in the config or "
            "deepspeed.ops.muon.MuonWithAuxAdam, which gather the matrices, or zero_optimization.stage 0.",
            path="zero_optimization.stage",
        )


def _shard_parameters(
    schema: Schema,
    module: nn.Module,
    optimizer: Optimizer | None,
    measure: NormRanks,
    placement: StatePlacement,
    make_planner: Callable[[AxisOf, Make], GroupPlanner],
) -> ZeroModel:
    """Parameters are cut, too, and gathered for each use."""
    fetching = _fetching(schema, module, measure, placement)
    coordinator, hooks = fetching
    placements = placed(
        measure.ranks_of, lambda axis: Placement(axis, gradient_group=axis.twin(), samples=measure.axis.size)
    )
    # Groups are made by all ranks together, also by a stage of a pipeline that trains nothing.
    next((placements(param) for param in module.parameters() if measure.ranks_of(param) is measure.axis), None)
    make = partial(StripedGroup, arrived=coordinator.gradient_arrived if hooks.handles else None)
    sharded = _taken(make_planner(placements, make), module, optimizer, measure, placement, fetching)
    return replace(sharded, remote=placement.remotes.remote if placement.remotes is not None else None)


def _planner(
    schema: Schema, module: nn.Module, precision: Precision, tiers: StateTiers, axis_of: AxisOf, make: Make | None
) -> GroupPlanner:
    names = {id(param): name for name, param in module.named_parameters()}
    travels = precision.reduce_dtypes(module)
    return GroupPlanner(schema, axis_of, precision, names, travels, partial(make_reduction, schema), make, tiers)


def _in_place(planner: GroupPlanner, module: nn.Module, optimizer: Optimizer | None, measure: NormRanks) -> ZeroModel:
    """Gradients are summed where they lie; without an optimizer, too, for a user who updates parameters."""
    schema, precision = planner.schema, planner.precision
    states = None if optimizer is None else OptimizerStates(optimizer, planner.groups, measure, waits=planner.waits)

    def holder_of(param: nn.Parameter) -> nn.Parameter:
        wide = param.dtype != precision.accumulate and param.is_floating_point()
        return states.holder(param) if wide and states is not None else param

    def dtypes() -> Callable[[nn.Parameter], torch.dtype]:
        planner.travels.update(precision.reduce_dtypes(module))
        return lambda param: planner.dtypes(param).reduce

    sparse, rows = embedding_parameters(module, all_rows=schema.sparse_gradients)
    holding = replicated.ReplicatedPlacement(
        planner.axis_of,
        holder_of,
        dtypes,
        lambda placement: ReductionWeights.of(schema, placement.size),
        main=planner.axis_of(nn.Parameter(torch.empty(0))),
        sparse=sparse,
        rows=rows,
    )
    gradients = replicated.ReplicatedGradients(list(module.named_parameters()), holding)
    ways = ReductionSettings(every_backward=False, limit=replicated.BUCKET_BYTES, first=replicated.FIRST_BYTES)
    reducer = GradientReducer(
        lambda: [gradients], planner.reduction_of, ways, None, registered=module.parameters, replicated=gradients
    )
    return ZeroModel(reducer, states, planner.names, measure.ranks_of, reductions=planner.reductions)


def _ways(planner: GroupPlanner, size: int, block: int) -> ReductionSettings:
    """How gradients leave where `size` ranks share them; a `block` of the model has so many elements."""
    zero, precision = planner.schema.zero_optimization, planner.precision
    given = "reduce_bucket_size" in zero.model_fields_set
    limit = min(max(_BUCKET, _BUCKET_PER_RANK * size), _BUCKET_MOST)
    limit = zero.reduce_bucket_size if given else max(limit, min(block + block // 64, _BLOCK_MOST))
    return ReductionSettings(
        # Gradients that wait on the parameters of stage 1 would be added up in the parameters' dtype.
        every_backward=zero.stage >= 2 or precision.accumulate != precision.param or planner.tiers.away,
        strict=given,
        limit=int(limit) if zero.contiguous_gradients else 1,
        # At stage 3 a rank that waits for gradients would not serve those that still need its parameters.
        overlap=zero.overlap_comm is not False or zero.stage == 3,
        early=not (zero.overlap_comm is False and zero.stage == 3),
    )


def _taken(
    planner: GroupPlanner,
    module: nn.Module,
    optimizer: Optimizer | None,
    measure: NormRanks,
    placement: StatePlacement,
    fetching: tuple[FetchCoordinator, ModuleHooks] | None = None,
) -> ZeroModel:
    """Gradients are taken from the parameters, and brought to the pieces that their owners update."""
    coordinator, hooks = fetching or (None, None)
    agreement, stack = placement.agreement, placement.stack
    states = None
    if optimizer is not None:
        device = rank_device()[1]
        pace = StepTiling.of(
            planner.schema, 0 if coordinator is None else None, pinned=planner.tiers.pinned, late=device.type != "cpu"
        )
        store = store_of(planner.schema, planner.tiers, optimizer, stack)
        zenflow = planner.schema.zero_optimization.zenflow
        deferral = None if zenflow is None else DeferredUpdates(zenflow, optimizer)
        states = agreement.run_together(
            lambda: OptimizerStates(optimizer, planner.groups, measure, pace=pace, store=store, deferral=deferral),
            "taking space on the disk for the optimizer's states",
            needed=planner.tiers.swap is not None,
        )
        stack.callback(states.close)
        if states.away:
            wait_in_modules(module, stack)
            states.compiled = runs_compiled(module)
        if isinstance(optimizer, (SingleDeviceMuon, MuonWithAuxAdam)):
            optimizer.whole = ShardedMatrices(states.groups)
    reducer = GradientReducer(
        lambda: states.groups if states is not None else [],
        planner.reduction_of,
        _ways(planner, measure.axis.size, blocks_of(module)[1]),
        agreement,
        registered=module.parameters,
        passes=coordinator,
    )
    if states is not None:
        states.reducer = reducer
    sharded = ZeroModel(
        reducer, states, planner.names, measure.ranks_of, coordinator, hooks, reductions=planner.reductions
    )
    sharded.leave_by_passes()
    return sharded


def _fetching(
    schema: Schema, module: nn.Module, measure: NormRanks, placement: StatePlacement
) -> tuple[FetchCoordinator, ModuleHooks]:
    """Cut the parameters, and have modules gather what they need."""
    zero, axis = schema.zero_optimization, measure.axis
    apply_zero_leaf_module_config(module, zero.leaf_module)
    mark_expert_blocks(module)
    remotes, stack = placement.remotes, placement.stack
    agreement = placement.agreement
    if remotes is not None:
        agreement.run_together(
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
    way, far = make_gather(schema), make_gather(schema, None if remotes is None else remotes.remote)
    for each in shards:
        each.gather = way if each.remote is None else far
    total = int(zero.model_persistence_threshold) // axis.size
    gather(persist(shards, int(zero.param_persistence_threshold), total))
    passes = FetchSchedule(
        agreement,
        FetchLimits(
            ahead=_ahead(schema, module, axis.size),
            live=int(zero.max_live_parameters),
            reuse=int(zero.max_reuse_distance),
        ),
        between_passes="max_reuse_distance" in zero.model_fields_set,
        log_traces=zero.log_trace_cache_warnings,
    )
    coordinator = FetchCoordinator(passes)
    hooks = ModuleHooks(module, coordinator)
    stack.callback(hooks.remove)
    hooks.install()
    meet_state_dicts(module, stack)
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
