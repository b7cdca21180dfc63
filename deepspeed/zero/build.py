"""From a config to what holds the states of a model and reduces its gradients, whole or spread over ranks.

Placements are made here, and so are reductions and gathers: a codec is another object of `make_reduction`,
`make_gather` or `make_block_gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.accelerator.side_stream import SideStream
from deepspeed.comm.codec import BlockCodec, block_codec
from deepspeed.config.rules import local_steps_conflict, one_bit_conflicts
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import NOTICE, log_dist_once
from deepspeed.memory.tier import StateTiers
from deepspeed.ops.muon import MuonWithAuxAdam, SingleDeviceMuon
from deepspeed.ops.onebit import ZeroOneAdam
from deepspeed.ops.onebit.base import OneBitOptimizer
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.agreement import RankAgreement, digest
from deepspeed.zero.birth.placement import rank_device
from deepspeed.zero.gradients import replicated
from deepspeed.zero.gradients.coded import CodedReduction, ErrorMemory
from deepspeed.zero.gradients.owned_signs import OwnedSigns
from deepspeed.zero.gradients.reducer import GradientReducer, ReductionSettings
from deepspeed.zero.gradients.reduction import ReduceToOwners, Reduction, ReductionWeights
from deepspeed.zero.gradients.sign_reduction import SignReduction
from deepspeed.zero.gradients.sparse import RowsToOwners, embedding_parameters, row_widths
from deepspeed.zero.offload import Budgeted, gather_from, remotes_of, reserve, store_of, tiers_of, uses_disk
from deepspeed.zero.parameters.coded import (
    CodedBlockGather,
    CodedGather,
    RestingWeights,
    travel_as_codes,
    travels_coded,
)
from deepspeed.zero.parameters.coordinator import FetchCoordinator
from deepspeed.zero.parameters.fetch_plan import FetchLimits
from deepspeed.zero.parameters.fetch_schedule import FetchSchedule
from deepspeed.zero.parameters.gather import BlockGather, Gather, NodeHops, PlainGather, gather
from deepspeed.zero.parameters.module_hooks import ModuleHooks
from deepspeed.zero.parameters.near import NearGather, check_size, near_copies
from deepspeed.zero.parameters.offloaded import ChunkTier, ChunkTiers
from deepspeed.zero.parameters.parameter import shard_parameter
from deepspeed.zero.parameters.shard import Shard, shard_of
from deepspeed.zero.parameters.sharding import keep_whole, persist, shard_module
from deepspeed.zero.parameters.uses import blocks_of
from deepspeed.zero.placement import AxisOf, NodeGroups, Placement, ShardAxes, node_groups, placed
from deepspeed.zero.public.export import meet_state_dicts
from deepspeed.zero.public.leaf import (
    apply_zero_leaf_module_config,
    mark_expert_blocks,
    set_z3_leaf_module,
    units_by_granularity,
)
from deepspeed.zero.states.groups import BlockGroup, Dtypes, Named, OffloadedGroup, StripedGroup
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

# What all ranks have to have alike, since it decides what messages mean and between whom they travel.
_SHARED_KEYS = (
    *("stage", "zero_quantized_weights", "zero_quantized_weights_format", "zero_quantized_gradients"),
    *("zeropp_loco_param", "zero_quantized_nontrainable_weights", "zero_hpz_partition_size", "mics_shard_size"),
)

_WEIGHT_FORMATS = {"int8": "int8", "fp8": "fp8_e4m3", "int4": "int4"}


def make_reduction(schema: Schema, placement: Placement, width: int = 0) -> Reduction:
    """How the gradients of a placement are summed and get to their owners; with a `width`, touched rows of them."""
    zero, late = schema.zero_optimization, placement.late
    weights = ReductionWeights.of(schema, placement.size, placement.copies if late else 1)
    now, then = (None, placement.replicate) if late else (placement.replicate, None)
    hops = placement.shard, placement.group, weights, now, then
    if zero.zero_quantized_gradients and placement.shard.size > 1:
        loco = zero.zeropp_loco_param
        memory = None if loco is None else ErrorMemory(loco.err_beta, loco.reset_T)
        return CodedReduction(*hops, codec=block_codec("int4"), nodes=placement.nodes, memory=memory)
    if width and placement.shard.size > 1:
        return RowsToOwners(*hops, width=width)
    return ReduceToOwners(*hops, everywhere=not zero.reduce_scatter, merged=zero.use_multi_rank_bucket_allreduce)


def make_gather(schema: Schema, remote: ChunkTier | None = None, hops: NodeHops | None = None) -> Gather[Shard]:
    """How parameters that are cut become whole, from the device or from where their chunks live."""
    zero = schema.zero_optimization
    one_by_one = zero.allgather_sequential
    plain = PlainGather(by_all_reduce=zero.use_all_reduce_for_fetch_params, one_by_one=one_by_one, hops=hops)
    way: Gather[Shard] = plain if remote is None else gather_from(remote, plain)
    if zero.zero_quantized_weights:
        way = CodedGather(weight_codec(schema), way, hops)
    return NearGather(way) if zero.zero_hpz_partition_size > 1 else way


def make_block_gather(schema: Schema, *, coded: bool = False) -> BlockGather | CodedBlockGather:
    """How updated blocks of whole parameters get to all ranks, where the config says so as codes."""
    limit = int(schema.zero_optimization.allgather_bucket_size) or 1
    return CodedBlockGather(weight_codec(schema), limit) if coded else BlockGather(limit)


def weight_codec(schema: Schema) -> BlockCodec:
    """In what parameters travel that travel as codes."""
    return block_codec(_WEIGHT_FORMATS[schema.zero_optimization.zero_quantized_weights_format])


@dataclass(frozen=True)
class ZeroModel:
    """The states of a model and what moves its gradients and parameters, whole or spread over ranks."""

    reducer: GradientReducer
    states: OptimizerStates | None
    names: dict[int, str]
    """The name of each parameter in the module, by id."""
    axes: ShardAxes
    coordinator: FetchCoordinator | None = None
    hooks: ModuleHooks | None = None
    remote: ChunkTier | None = None
    """Where parameters live between their uses; None: on the device."""
    resting: RestingWeights | None = None
    """Weights that are frozen, where the config says that they rest as codes."""
    reductions: Mapping[Placement, Reduction] = field(default_factory=dict)
    """How gradients are reduced, in the order in which placements were first used."""

    def reduction_states(self) -> dict[str, dict[str, Tensor]]:
        """What reductions remember from step to step, by their numbers; empty if nothing."""
        states = {str(number): each.state_dict() for number, each in enumerate(self.reductions.values())}
        return {number: state for number, state in states.items() if state}

    def load_reduction_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what `reduction_states` gave on the same rank of as many; what is missing begins anew."""
        for number, each in enumerate(self.reductions.values()):
            each.load_state_dict(states.get(str(number), {}))

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
                shard = shard_parameter(param, self.axes(param), name, self.remote)
                shard.replicas = self.axes.replicas(param)
                shard.release()
        if self.hooks.handles:
            self.hooks.look_again()
        else:  # until now every parameter stayed whole
            self.hooks.install()
            self.launch_by_passes()

    def launch_by_passes(self) -> None:
        """Where parameters are gathered, let gradients leave by their passes: [Note: gradients leave by the plan]."""
        coordinator = self.coordinator
        if coordinator is not None and self.hooks is not None and self.hooks.handles:
            self.reducer.hooks.clock = coordinator.schedule
            coordinator.schedule.reducer = self.reducer


@dataclass
class StateBuilder:
    """Holds the states of a model as the config says; what they need is closed with the stack."""

    schema: Schema
    module: nn.Module
    precision: Precision
    optimizer: Optimizer | None
    measure: NormRanks
    alone: AxisGroup
    """An axis on which this rank has no other."""
    agreement: RankAgreement
    stack: ExitStack
    budgeted: Budgeted | None
    backwards: int = 1
    """Of a step."""
    axes: ShardAxes = field(init=False)
    tiers: StateTiers = field(init=False)
    """Where states live, by the offload sections or by budgets."""
    remotes: ChunkTiers | None = field(init=False)
    """Where the chunks of stage 3 live."""

    def __post_init__(self) -> None:
        schema, budgeted, stack = self.schema, self.budgeted, self.stack
        zero = schema.zero_optimization
        if zero.shards_states and zero.mics_shard_size > 0 and self.measure.lies_on is not None:
            raise DeepSpeedConfigError(
                "zero_optimization.mics_shard_size: the model has experts that lie on several ranks, which MiCS does "
                "not cut; remove the key, or keep the experts of a layer on one rank.",
                path="zero_optimization.mics_shard_size",
            )
        optimizer = self.optimizer
        if isinstance(optimizer, OneBitOptimizer):
            self._require_signs(optimizer)
            self.measure = replace(self.measure, local=lambda: optimizer.local)
        _require_equal_codecs(schema, optimizer, self.agreement, self.measure.axis)
        self.axes = ShardAxes(self.measure.ranks_of, zero.mics_shard_size if zero.shards_states else -1)
        self.tiers, self.remotes = self.agreement.run_together(
            lambda: (tiers_of(schema, budgeted, stack), remotes_of(schema, budgeted, stack)),
            "opening swap files",
            needed=uses_disk(schema),
        )

    def _require_signs(self, optimizer: OneBitOptimizer) -> None:
        """Refuse what does not work with an optimizer that exchanges signs."""
        kind, sharded = type(optimizer), self.schema.zero_optimization.shards_states
        others = [one_bit_conflicts(self.schema)]
        if self.measure.lies_on is not None:
            others.append("experts that lie on several ranks")
        if sharded and isinstance(optimizer, ZeroOneAdam) and optimizer.local_step_clipper != 1:
            others.append(f"{local_steps_conflict(self.schema)} (use stage 0, or local_step_clipper 1)")
        if sharded and any("exp_avg_mask" in group for group in optimizer.param_groups):
            others.append("exp_avg_mask at zero_optimization.stage 1 to 3, where ranks have parts of parameters")
        if found := ", ".join(filter(None, others)):
            raise DeepSpeedConfigError(
                f"optimizer: {kind.__name__}, whose ranks exchange signs of momenta, does not work with {found}",
                path="optimizer.type",
            )

    def build(self) -> ZeroModel:
        """Choose the path by the config's stage."""
        schema, zero, ranks_of = self.schema, self.schema.zero_optimization, self.measure.ranks_of
        size = self.measure.axis.size
        check_size(self.measure.axis, int(zero.zero_hpz_partition_size))
        if zero.zero_quantized_weights and size > 1:
            self._tell_codes()
        if zero.stage > 0 and (size > 1 or self.remotes is not None):
            _refuse_torch_muon(self.optimizer)
        coded = zero.zero_quantized_nontrainable_weights or schema.weight_quantization.at_birth is not None
        if zero.stage == 3 and (size > 1 or self.remotes is not None or coded):
            return self._shard_parameters()
        if size > 1 and zero.stage > 0 and self.optimizer is not None:
            return self._taken(placed(ranks_of, self._placement), self._resident)
        if zero.stage == 3:
            keep_whole(self.module, self.measure.axis)
        placements = placed(ranks_of, lambda axis: Placement(self.alone, replicate=axis, samples=size))
        in_buckets = schema.optimizer_in_backward.enabled and size > 1  # gradients that are used up as they are reduced
        if self.optimizer is not None and (self.tiers.away or zero.offloads_optimizer or in_buckets):
            return self._taken(placements, OffloadedGroup)
        return self._in_place(placements)

    def _tell_codes(self) -> None:
        """How much travels as codes, and how much is too small for that."""
        numel = {True: 0, False: 0}
        for param in self.module.parameters():
            shape = torch.Size(getattr(param, "ds_shape", param.shape))
            numel[travels_coded(shape, param.dtype)] += shape.numel()
        log_dist_once(
            f"zero_quantized_weights: {numel[True]:,} parameters travel as {weight_codec(self.schema).name} codes, and "
            f"{numel[False]:,} in vectors and small matrices as they are",
            [0],
            NOTICE,
        )

    def _coded(self, param: nn.Parameter) -> bool:
        """Whether a parameter that stays whole comes as codes after a step."""
        return self.schema.zero_optimization.zero_quantized_weights and travels_coded(param.shape, param.dtype)

    def _resident(
        self, members: Sequence[Named], placement: Placement, dtypes: Dtypes, options: dict[str, Any]
    ) -> BlockGroup:
        way = make_block_gather(self.schema, coded=self._coded(members[0][1]))
        aligned = self.schema.zero_optimization.parameter_alignment
        return BlockGroup(members, placement, dtypes, options, gather=way, aligned=aligned)

    def _placement(self, axis: AxisGroup, *, apart: bool = False) -> Placement:
        """Of parameters that lie on these ranks, with gradients on a group of their own if they travel `apart`."""
        shard, replicas = self.axes.levels(axis)
        kept = self._every_backward and not (self.tiers.away or self.schema.optimizer_in_backward.enabled)
        late = replicas is not None and self.backwards > 1 and kept
        size, group = self.measure.axis.size, shard.twin() if apart else None
        return Placement(shard, replicas, group, samples=size, late=late, nodes=self._nodes(shard))

    def _nodes(self, axis: AxisGroup) -> NodeGroups | None:
        """Where codes of gradients are added up before they leave a node."""
        if not self.schema.zero_optimization.zero_quantized_gradients or axis.size == 1:
            return None
        nodes = node_groups(axis)
        hops = f"two hops, {nodes.intra.size} ranks a node" if nodes else "one hop: no nodes with as many ranks each"
        log_dist_once(f"zero_quantized_gradients: the gradients of axis {axis.name!r} travel in {hops}", [0], NOTICE)
        return nodes

    def _reduction(self, placement: Placement, width: int) -> Reduction:
        """How the gradients of a placement are reduced, for this optimizer."""
        plain = make_reduction(self.schema, placement, width)
        if not isinstance(self.optimizer, OneBitOptimizer) or placement.shard.size * placement.copies == 1:
            return plain
        if placement.replicate is None:
            return OwnedSigns(plain, placement.shard, self.optimizer)
        return SignReduction(plain, placement.replicate, self.optimizer)

    def _planner(self, axis_of: AxisOf, make: Make | None) -> GroupPlanner:
        schema, precision = self.schema, self.precision
        names = {id(param): name for name, param in self.module.named_parameters()}
        travels, reduction_of = precision.reduce_dtypes(self.module), self._reduction
        coded = isinstance(self.optimizer, OneBitOptimizer) or schema.zero_optimization.zero_quantized_gradients
        rows = {} if coded or make is None else row_widths(self.module, all_rows=schema.sparse_gradients)
        return GroupPlanner(
            schema, axis_of, precision, names, travels, reduction_of, make, self.tiers, apart=self._coded, rows=rows
        )

    def _in_place(self, axis_of: AxisOf) -> ZeroModel:
        """Gradients are summed where they lie; without an optimizer, too, for a user who updates parameters."""
        planner, module, measure = self._planner(axis_of, None), self.module, self.measure
        schema, precision, optimizer = self.schema, self.precision, self.optimizer
        states = None if optimizer is None else OptimizerStates(optimizer, planner.groups, measure, waits=planner.waits)

        def holder_of(param: nn.Parameter) -> nn.Parameter:
            wide = param.dtype != precision.accumulate and param.is_floating_point()
            return states.holder(param) if wide and states is not None else param

        def dtypes() -> Callable[[nn.Parameter], torch.dtype]:
            planner.travels.update(precision.reduce_dtypes(module))
            return lambda param: planner.dtypes(param).reduce

        sparse, rows = embedding_parameters(module, all_rows=schema.sparse_gradients)
        holding = replicated.ReplicatedPlacement(
            axis_of,
            holder_of,
            dtypes,
            lambda placement: ReductionWeights.of(schema, placement.size),
            main=axis_of(nn.Parameter(torch.empty(0))),
            sparse=sparse,
            rows=rows,
        )
        gradients = replicated.ReplicatedGradients(list(module.named_parameters()), holding)
        exchange = planner.reduction_of(holding.main, None)
        if isinstance(exchange, SignReduction) and states is not None:
            exchange.name_of = partial(_name_of, states)
        ways = ReductionSettings(every_backward=False, limit=replicated.BUCKET_BYTES, first=replicated.FIRST_BYTES)
        reducer = GradientReducer(
            lambda: [gradients], planner.reduction_of, ways, None, registered=module.parameters, replicated=gradients
        )
        return ZeroModel(reducer, states, planner.names, self.axes, reductions=planner.reductions)

    def _shard_parameters(self) -> ZeroModel:
        """Parameters are cut, too, and gathered for each use."""
        measure = self.measure
        coordinator, hooks = fetching = self._fetching()
        placements = placed(measure.ranks_of, partial(self._placement, apart=True))
        # Groups are made by all ranks together, also by a stage of a pipeline that trains nothing.
        next((placements(param) for param in self.module.parameters() if measure.ranks_of(param) is measure.axis), None)
        make = partial(StripedGroup, arrived=coordinator.gradient_arrived if hooks.handles else None)
        sharded = self._taken(placements, make, fetching)
        quantised = self.schema.zero_optimization.zero_quantized_nontrainable_weights
        return replace(
            sharded,
            remote=None if self.remotes is None else self.remotes.remote,
            resting=RestingWeights(self.module, weight_codec(self.schema)) if quantised else None,
        )

    def _taken(
        self, axis_of: AxisOf, make: Make, fetching: tuple[FetchCoordinator, ModuleHooks] | None = None
    ) -> ZeroModel:
        """Gradients are taken from the parameters, and brought to the pieces that their owners update."""
        planner = self._planner(axis_of, make)
        coordinator, hooks = fetching or (None, None)
        states = None if self.optimizer is None else self._states(self.optimizer, planner, coordinator is None)
        reducer = GradientReducer(
            lambda: states.groups if states is not None else [],
            planner.reduction_of,
            self._ways(),
            self.agreement,
            registered=self.module.parameters,
            passes=coordinator,
        )
        if states is not None:
            states.reducer = reducer
            for exchange in planner.reductions.values():
                if isinstance(exchange, OwnedSigns):
                    exchange.groups, states.local_gradients = lambda: states.groups, exchange.gradients
        found = planner.reductions
        sharded = ZeroModel(reducer, states, planner.names, self.axes, coordinator, hooks, reductions=found)
        sharded.launch_by_passes()
        return sharded

    def _states(self, optimizer: Optimizer, planner: GroupPlanner, whole: bool) -> OptimizerStates:
        """States in the planner's groups; without tiles on the device where parameters stay `whole`."""
        schema, late = self.schema, rank_device()[1].type != "cpu"
        pace = StepTiling.of(schema, 0 if whole else None, pinned=self.tiers.pinned, late=late)
        store = store_of(schema, self.tiers, optimizer, self.stack)
        zenflow = schema.zero_optimization.zenflow
        deferral = None if zenflow is None else DeferredUpdates(zenflow, optimizer)
        states = self.agreement.run_together(
            lambda: OptimizerStates(optimizer, planner.groups, self.measure, pace=pace, store=store, deferral=deferral),
            "taking space on the disk for the optimizer's states",
            needed=self.tiers.swap is not None,
        )
        self.stack.callback(states.close)
        if states.away:
            wait_in_modules(self.module, self.stack)
            states.compiled = runs_compiled(self.module)
        if isinstance(optimizer, (SingleDeviceMuon, MuonWithAuxAdam)):
            optimizer.whole = ShardedMatrices(states.groups)
        return states

    @property
    def _every_backward(self) -> bool:
        """Whether whole gradients do not outlive a backward.

        Gradients that wait on the parameters of stage 1 would be added up in the parameters' dtype.
        """
        precision = self.precision
        stays = not self.schema.zero_optimization.shards_gradients and precision.accumulate == precision.param
        return self.tiers.away or not stays

    def _ways(self) -> ReductionSettings:
        """How gradients leave."""
        zero, size = self.schema.zero_optimization, self.measure.axis.size
        block = blocks_of(self.module)[1]
        given = "reduce_bucket_size" in zero.model_fields_set
        limit = min(max(_BUCKET, _BUCKET_PER_RANK * size), _BUCKET_MOST)
        limit = zero.reduce_bucket_size if given else max(limit, min(block + block // 64, _BLOCK_MOST))
        return ReductionSettings(
            every_backward=self._every_backward,
            strict=given,
            limit=int(limit) if zero.contiguous_gradients else 1,
            # At stage 3 a rank that waits for gradients would not serve those that still need its parameters.
            overlap=zero.overlap_comm is not False or zero.stage == 3,
            early=not (zero.overlap_comm is False and zero.stage == 3),
        )

    def _fetching(self) -> tuple[FetchCoordinator, ModuleHooks]:
        """Cut the parameters, and have modules gather what they need."""
        schema, module, remotes = self.schema, self.module, self.remotes
        zero, axes = schema.zero_optimization, self.axes
        apply_zero_leaf_module_config(module, zero.leaf_module)
        mark_expert_blocks(module)
        if remotes is not None:
            self.agreement.run_together(
                lambda: reserve(remotes, module, axes),
                "taking space on the disk for parameters",
                needed=uses_disk(schema),
            )
        shards = shard_module(module, axes, remotes)
        for unit in units_by_granularity(module, zero.module_granularity_threshold).values():
            set_z3_leaf_module(unit, True)
        hops = self._hops()
        way = make_gather(schema, None, hops)
        far = make_gather(schema, None if remotes is None else remotes.remote, hops)
        ways: dict[int, CodedGather] = {}
        if schema.weight_quantization.at_birth is not None and not any(each.codec for each in shards):
            raise DeepSpeedConfigError(
                "weight_quantization.quantized_initialization: no weight of the model rests as codes; build it inside "
                "deepspeed.zero.Init(config_dict_or_path=...) with this config, or use post_init_quant",
                path="weight_quantization.quantized_initialization",
            )
        for each in shards:
            each.strict = zero.enable_sanity_checks
            each.gather = way if each.remote is None else far
            if each.codec is not None:
                travel_as_codes(each, ways)
        total = int(zero.model_persistence_threshold) // axes.levels(self.measure.axis)[0].size
        missing = persist(shards, int(zero.param_persistence_threshold), total)
        if zero.zero_quantized_nontrainable_weights:
            RestingWeights(module, weight_codec(schema)).take()
        copies = near_copies(shards, int(zero.zero_hpz_partition_size))
        gather(missing)
        passes = FetchSchedule(
            self.agreement,
            FetchLimits(self._ahead(), live=int(zero.max_live_parameters), reuse=int(zero.max_reuse_distance)),
            between_passes="max_reuse_distance" in zero.model_fields_set,
            log_traces=zero.log_trace_cache_warnings,
        )
        passes.copies = copies
        coordinator = FetchCoordinator(passes)
        hooks = ModuleHooks(module, coordinator)
        self.stack.callback(hooks.remove)
        hooks.install()
        meet_state_dicts(module, self.stack)
        return coordinator, hooks

    def _hops(self) -> NodeHops | None:
        """Whether parameters are gathered between nodes first."""
        zero, axis = self.schema.zero_optimization, self.axes.levels(self.measure.axis)[0]
        if not zero.mics_hierarchical_params_gather or zero.mics_shard_size < 1:
            return None
        met = axis.meet_nodes()
        found = "between nodes, then within" if met else "in one hop: the ranks of a group lie on one node, or unevenly"
        log_dist_once(f"mics_hierarchical_params_gather: parameters are gathered {found}", [0], NOTICE)
        return NodeHops(SideStream(rank_device()[1])) if met else None

    def _ahead(self) -> int:
        """Elements that are gathered ahead: as the config says, else one block, or what makes a worthwhile message."""
        zero = self.schema.zero_optimization
        if zero.allgather_sequential:
            return 0
        ahead = int(zero.prefetch_bucket_size)
        if "prefetch_bucket_size" in zero.model_fields_set:
            return ahead
        return max(min(ahead, _WORTHWHILE * self.measure.axis.size), blocks_of(self.module)[1])


def _require_equal_codecs(
    schema: Schema, optimizer: Optimizer | None, agreement: RankAgreement, axis: AxisGroup
) -> None:
    """An error on all ranks that names those whose messages the others would misread."""
    zero = schema.zero_optimization
    values = {f"zero_optimization.{key}": getattr(zero, key) for key in _SHARED_KEYS}
    values["sparse_gradients"] = schema.sparse_gradients
    signs = optimizer if isinstance(optimizer, OneBitOptimizer) else None
    values["optimizer"] = signs and [type(signs).__name__, *(f"{key} {getattr(signs, key)}" for key in signs.settings)]
    said = agreement.exchange([digest(value) for value in values.values()], "codecs of all ranks")
    wrong = [key for key, column in zip(values, said.unbind(1), strict=True) if bool((column != column[0]).any())]
    if wrong:
        others = [axis.ranks[place] for place, row in enumerate(said) if bool((row != said[0]).any())]
        mine = ", ".join(f"{key} {values[key]!r}" for key in wrong)
        raise DeepSpeedConfigError(
            f"{wrong[0]}: rank {', '.join(map(str, others[:8]))} has another config than rank {axis.ranks[0]}, and "
            f"ranks would misread each other's messages; this rank has {mine}. Give all ranks the same config",
            path=wrong[0],
        )


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


def _name_of(states: OptimizerStates, master: Any) -> str:
    """What the parameter is called that a tensor of the optimizer stands for; other names are themselves."""
    pieces = (piece for group in states.groups for piece in group.pieces)
    return next((piece.name for piece in pieces if piece.master is master), str(master))
