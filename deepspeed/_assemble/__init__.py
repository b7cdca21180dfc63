"""The composition root: a request of the user → collaborators → engine. A failure on the way leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed._assemble.observers import watch, watch_hangs
from deepspeed.checkpoint.pretrained import fill, take_place
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.features import unused_by_model
from deepspeed.errors import UsageError
from deepspeed.events import EventStream
from deepspeed.fusion.build import fuse
from deepspeed.log import set_log_level_from_string
from deepspeed.moe.auto_ep import spread_blocks
from deepspeed.moe.placement import SpreadExperts, cuts_of_experts, export_whole, spread_experts
from deepspeed.moe.utils import split_experts
from deepspeed.ops.precompile import KernelPrecompiler
from deepspeed.parallel import ParallelLayout, layout_from_mpu
from deepspeed.parallel.mpu import current_layout
from deepspeed.pipe.axes import agree_on_experts, over_stages, share_stage_sequences, split_stage, spread_stage
from deepspeed.pipe.engine import PipelineEngine
from deepspeed.pipe.module import PipelineModule
from deepspeed.precision.policy import Precision, make_scale
from deepspeed.runtime.accumulation import Accumulation
from deepspeed.runtime.activation_checkpointing.configuration import configure_from
from deepspeed.runtime.activation_checkpointing.offload_activations import keep_hidden_states
from deepspeed.runtime.backward import Backward
from deepspeed.runtime.dataloader import build_dataloader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.place_module import place, replicate
from deepspeed.runtime.step.choose import (
    choose_optimizer,
    choose_scheduler,
    returned_optimizer,
    warn_if_frozen,
    warn_without_optimizer,
)
from deepspeed.runtime.step.in_backward import InBackward, update_in_backward
from deepspeed.runtime.step.optimizers import hold_states, require_tested
from deepspeed.runtime.step.state_access import open_access
from deepspeed.runtime.step.stepper import Stepper, step_scenes
from deepspeed.sequence.build import share_sequences
from deepspeed.sequence.tiling import tile_model
from deepspeed.tensor_parallel import SplitModel, cuts_of, split_model
from deepspeed.tensor_parallel.build import InputCheck
from deepspeed.zero.agreement import RankAgreement, digest
from deepspeed.zero.birth.placement import rank_device
from deepspeed.zero.build import ZeroModel, hold_model_states, state_placement
from deepspeed.zero.memory_budget import budget, parameters_leave
from deepspeed.zero.parameters.module_hooks import ModuleHooks
from deepspeed.zero.parameters.sharding import Reshard
from deepspeed.zero.states.norm import NormRanks
from deepspeed.zero.states.states import OptimizerStates

__all__ = ["Request", "assemble"]


@dataclass
class Request:
    """What `deepspeed.initialize` was asked for, its arguments sorted out."""

    config: DeepSpeedConfig
    module: nn.Module
    optimizer: Optimizer | Callable[..., Optimizer] | None = None
    model_parameters: list[Any] | None = None
    training_data: Any = None
    lr_scheduler: Any = None
    mpu: Any = None
    mesh: Any = None
    collate_fn: Callable[..., Any] | None = None


def assemble(request: Request) -> DeepSpeedEngine:
    """Build the engine; whatever was opened is closed again if that fails."""
    with ExitStack() as stack:
        engine = _build(request, stack)
        engine._parts.resources = stack.pop_all()
        return engine


def _build(request: Request, stack: ExitStack) -> DeepSpeedEngine:
    config, module = request.config, request.module
    schema = config.schema
    if schema.log_level is not None:
        set_log_level_from_string(schema.log_level)
    watch_hangs(schema)  # first: groups that are made from now on wait as long as it says
    layout = _layout(request, stack)
    split = _split(request, layout)
    local_rank, device = rank_device()
    precision = Precision.from_config(schema, sequence_size=layout.sequence.size)
    precision.require_device()
    rehearsal = _rehearsal(device, precision, stack)
    fuse(schema, module, stack, rehearsal, precision.param, whole=not isinstance(module, PipelineModule))
    spills = parameters_leave(schema, module, precision, layout.samples)
    remote = schema.zero_optimization.offloads_parameters or spills
    place(module, device, precision, schema.zero_optimization, remote=remote)
    experts = _experts(request, layout, stack)
    lies_on = (lambda _: layout.samples) if experts is None else experts.lies_on
    replicate(module, lies_on, remote=remote)

    events, scale = EventStream(), make_scale(schema, precision)
    parameters = split_experts(request.model_parameters, module)
    basic = _optimizer(request, parameters, precision)
    sharded = _states(request, layout, precision, basic, stack, experts, split)
    states, reducer = sharded.states, sharded.reducer
    if rehearsal is not None and basic is not None and states is not None:
        rehearsal.add(step_scenes(basic, states, precision.accumulate))
    stack.callback(sharded.close)
    assert config.batch is not None, "a config that is not partial has its batch sizes"
    accumulation = Accumulation(config.batch.steps, managed=schema.managed_gradient_accumulation)
    forward = _forward(module, precision, sharded.hooks, split.check)
    parts = Parts(
        config=config,
        module=module,
        device=device,
        local_rank=local_rank,
        layout=layout,
        precision=precision,
        scale=scale,
        accumulation=accumulation,
        reducer=reducer,
        backward=Backward(reducer, accumulation, scale, events, listens=basic is not None),
        events=events,
        forward=_around(request, layout, stack, forward, split),
        make_loader=partial(
            build_dataloader,
            data_parallel_rank=layout.data.rank,
            data_parallel_size=layout.data.size,
            drop_last=schema.dataloader_drop_last,
        ),
        resources=stack,
        lies_on=lies_on,
        experts=experts,
        states=states,
        sharded=sharded,
        basic_optimizer=basic,
        mpu=request.mpu,
    )
    _complete(parts, request, stack)
    return PipelineEngine(parts) if isinstance(module, PipelineModule) else DeepSpeedEngine(parts)


def _experts(request: Request, layout: ParallelLayout, stack: ExitStack) -> SpreadExperts | None:
    """The experts of the model, each where it lies; None if it has none. What the model has no use for is told."""
    first, staged = request.config.schema.use_data_before_expert_parallelism, isinstance(request.module, PipelineModule)
    experts = spread_experts(request.module, layout, stack, data_first=first)
    shared = layout.sequence.size > 1
    request.config.tell_unused(unused_by_model(staged=staged, experts=experts is not None, shared_sequences=shared))
    if not staged:  # a stage is no model
        export_whole(request.module, experts, stack)
    return experts


def _rehearsal(device: torch.device, precision: Precision, stack: ExitStack) -> KernelPrecompiler | None:
    """What compiles kernels while the engine is put together; autocast decides on dtypes too late for that."""
    made = None if precision.autocast is not None else KernelPrecompiler.on(device)
    if made is not None:
        stack.callback(made.close)
    return made


def _optimizer(request: Request, parameters: list[Any] | None, precision: Precision) -> Optimizer | None:
    """The optimizer that was given or is asked for; None where there is none."""
    schema = request.config.schema
    basic = choose_optimizer(schema, request.optimizer, parameters, request.module)
    if basic is None:
        warn_without_optimizer(schema, request.training_data)
        return None
    if schema.zero_optimization.shards_states and not schema.zero_allow_untested_optimizer:
        require_tested(basic)
    hold_states(basic, precision)
    return basic


def _complete(parts: Parts, request: Request, stack: ExitStack) -> None:
    """Add what is optional: the optimizer's step, schedule, data, activation checkpointing, what watches."""
    schema = parts.config.schema
    basic, states = parts.basic_optimizer, parts.states
    if not isinstance(parts.module, PipelineModule):  # stages compare what they train once all of them are built
        warn_if_frozen(parts.module, basic)
    if basic is not None and states is not None:
        stack.callback(states.end_norm)
        owner = open_access(parts, basic, states, stack)
        trained = {id(param) for group in states.groups for param in group.params}
        parts.stepper = Stepper(
            optimizer=basic,
            states=states,
            owner=owner,
            reducer=parts.reducer,
            backward=parts.backward,
            scale=parts.scale,
            check_overflow=parts.precision.check_overflow,
            clipping=schema.gradient_clipping,
            report_norm=schema.zero_optimization.compute_grad_norm,
            stop=schema.nonfinite_gradients == "stop",
            others=[param for param in parts.module.parameters() if id(param) not in trained],
            in_backward=_in_backward(parts, basic, states, stack),
        )
        parts.optimizer = returned_optimizer(parts, basic, parts.stepper, owner, stack)
    stack.callback(configure_from(schema.activation_checkpointing, parts.layout))
    parts.lr_scheduler = choose_scheduler(schema.scheduler, request.lr_scheduler, request.optimizer, basic)
    if request.training_data is not None:
        parts.training_dataloader = parts.make_loader(
            request.training_data,
            batch_size=parts.config.train_micro_batch_size_per_gpu,
            collate_fn=request.collate_fn,
            shuffle=not isinstance(parts.module, PipelineModule),  # as DeepSpeed: data may be grouped, by length say
        )
        if states is not None and states.deferral is not None and hasattr(request.training_data, "__len__"):
            states.deferral.rhythm.know_epoch(len(parts.training_dataloader) // parts.accumulation.steps)
    watch(parts, stack)


def _in_backward(parts: Parts, optimizer: Optimizer, states: OptimizerStates, stack: ExitStack) -> InBackward | None:
    """What updates parameters while backward runs, if the config asks for that."""
    staged = isinstance(parts.module, PipelineModule)
    made = parts.backward.updates = update_in_backward(parts, optimizer, states, staged=staged)
    if made is not None:
        stack.callback(made.close)
    return made


def _layout(request: Request, stack: ExitStack) -> ParallelLayout:
    """The layout of the mpu, of the mesh, or of the sizes in the config."""
    sizes = request.config.schema.axis_sizes
    if request.mpu is not None:
        layout = layout_from_mpu(request.mpu)
    elif request.mesh is not None:
        layout = ParallelLayout.from_mesh(request.mesh)
    else:
        layout = ParallelLayout.build(**sizes)
    stack.callback(layout.close)
    if request.mpu is not None or request.mesh is not None or max(sizes.values()) > 1:
        current_layout.set(layout)
        stack.callback(current_layout.forget, layout)
    layout.create_groups()
    return layout


def _split(request: Request, layout: ParallelLayout) -> SplitModel:
    """Split the layers and blocks of experts that ranks share, of the whole model or of a stage."""
    schema, module, opened = request.config.schema, request.module, Reshard(layout.samples)
    empty = take_place(module)
    if isinstance(module, PipelineModule):
        spread_stage(schema, module, layout, opened)
        agree_on_experts(module, layout)
        split = split_stage(schema, module, layout, opened)
    else:
        spread_blocks(schema, module, layout, opened)
        split = split_model(schema, module, layout.tensor, opened, request.mpu)
    fill(module, empty, cuts_of_experts(module), cuts_of(module, layout.tensor.rank))
    return split


def is_split(param: nn.Parameter, experts: SpreadExperts | None = None) -> bool:
    """True for a parameter of which model-parallel ranks hold different parts, by the marks Megatron sets."""
    marked = getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False)
    return bool(marked) or (experts is not None and experts.crosses(param))


def _states(
    request: Request,
    layout: ParallelLayout,
    precision: Precision,
    basic: Optimizer | None,
    stack: ExitStack,
    experts: SpreadExperts | None,
    split: SplitModel,
) -> ZeroModel:
    """What the optimizer updates and what reduces gradients, whole or spread over ranks."""
    model, axis = layout.model, layout.samples
    schema, module = request.config.schema, request.module
    zero = schema.zero_optimization
    model_group = model.group if model.size > 1 else None
    lies_on = None if experts is None else experts.lies_on
    parts = partial(is_split, experts=experts)
    measure = NormRanks(
        axis,
        model_group,
        parts,
        all_used=not zero.ignore_unused_parameters,
        elsewhere=split.elsewhere,
        lies_on=lies_on,
    )
    if isinstance(module, PipelineModule):
        measure = over_stages(measure, module, layout)
    hosts = RankAgreement(layout.stage if experts is not None and experts.wide else axis)
    if experts is not None and zero.shards_states:
        _require_alike(experts, module, hosts)
    quarters = state_placement(schema, budget(schema, module, precision, basic, axis, hosts), hosts, stack)
    return hold_model_states(schema, module, precision, basic, measure, layout.alone, quarters)


def _require_alike(experts: SpreadExperts, module: nn.Module, hosts: RankAgreement) -> None:
    """Refuse ranks that train other parameters of their experts than others do: ranks number them alike."""
    frozen = experts.frozen(module)
    told = hosts.exchange([digest(frozen)], "experts that are trained")[:, 0].tolist()
    other = next((rank for rank, word in enumerate(told) if word != told[0]), None)
    if other is not None:
        raise UsageError(
            f"some ranks train other parameters of their experts than rank 0 does (the first is rank {other} of those "
            f"that share data); frozen on this one: {', '.join(frozen[:4]) or 'none'}{', …' * (len(frozen) > 4)}. From "
            "zero_optimization.stage 1 on, freeze the same parameters of all experts of a layer, or use stage 0"
        )


def _around(
    request: Request, layout: ParallelLayout, stack: ExitStack, forward: Callable[..., Any], split: SplitModel
) -> Callable[..., Any]:
    """`forward` within what the config puts around it, from the inside to the outside."""
    schema, module = request.config.schema, request.module
    forward = keep_hidden_states(schema.activation_checkpointing, module, forward)
    entrance = None if split.entrances is None else split.entrances.take
    forward = tile_model(schema.sequence_parallel, module, stack, forward, split.tile_loss, entrance)
    if isinstance(module, PipelineModule):
        share_stage_sequences(schema, module, layout, stack, split.heads)
        return forward
    return share_sequences(schema, module, layout, stack, forward, split.heads)


def _forward(
    module: nn.Module, precision: Precision, hooks: ModuleHooks | None, check_inputs: InputCheck | None
) -> Callable[..., Any]:
    """How the engine calls the module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if check_inputs is not None:
            check_inputs(args, kwargs)
        if hooks is not None:
            hooks.look_again()
        cast_args, cast_kwargs = precision.cast_inputs(args, kwargs)
        with precision.forward_context():
            try:
                return module(*cast_args, **cast_kwargs)
            except RuntimeError as error:
                precision.explain(error, (cast_args, cast_kwargs))
                raise

    return call
