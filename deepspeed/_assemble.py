"""The composition root: a request of the user → collaborators → engine. A failure on the way leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed._shard import Sharded, shard
from deepspeed._watch import watch
from deepspeed.comm.coalesced import broadcast_coalesced
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import UsageError
from deepspeed.events import EventStream
from deepspeed.log import log_dist, set_log_level_from_string
from deepspeed.ops.muon import tag_attention_heads
from deepspeed.parallel import AxisGroup, ParallelLayout, layout_from_mpu
from deepspeed.parallel.current import current_layout
from deepspeed.precision.policy import Precision, make_scale
from deepspeed.runtime.accumulation import Accumulation
from deepspeed.runtime.activation_checkpointing.state import configure_from
from deepspeed.runtime.backward import Backward, Reducer
from deepspeed.runtime.base_optimizer import MixedPrecisionOptimizer
from deepspeed.runtime.dataloader import build_dataloader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import build_scheduler
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.reduction.reducer import GradientReducer, Slot
from deepspeed.runtime.reduction.sparse import embedding_parameters
from deepspeed.runtime.step.masters import Masters
from deepspeed.runtime.step.modes import Modes
from deepspeed.runtime.step.optimizers import build_optimizer, hold_states, require_tested
from deepspeed.runtime.step.state_access import open_access
from deepspeed.runtime.step.stepper import States, Stepper
from deepspeed.runtime.step.zero_optimizer import ZeroOptimizer
from deepspeed.zero.birth.site import rank_device
from deepspeed.zero.gradients.reduction import Weights
from deepspeed.zero.parameters.hooks import ModuleHooks
from deepspeed.zero.parameters.shard import shard_of
from deepspeed.zero.parameters.sharding import convert_shards, keep_whole, put_away
from deepspeed.zero.public.rehook import ParameterOffload
from deepspeed.zero.states.lookup import Owner, attach
from deepspeed.zero.states.sharded import Measure

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
    layout = _layout(request, stack)
    local_rank, device = rank_device()
    precision = Precision.from_config(schema, sequence_size=layout["sp"].size)
    precision.require_device()
    _place(module, device, precision, schema.zero_optimization.stage)
    replicate(module, layout)
    log_dist(f"precision: {precision.describe()}")

    events, scale = EventStream(), make_scale(schema, precision)
    basic = make_optimizer(request)
    if schema.zero_optimization.stage > 0 and basic is not None and not schema.zero_allow_untested_optimizer:
        require_tested(basic)
    if basic is not None:
        hold_states(basic, precision)
    masters, reducer, sharded = _states(request, layout, precision, basic, stack)
    stack.callback(reducer.close)
    assert config.batch is not None, "a config that is not partial has its batch sizes"
    accumulation = Accumulation(config.batch.steps, managed=schema.managed_gradient_accumulation)
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
        forward=_forward(module, precision, sharded.hooks if sharded else None),
        make_loader=_loader_maker(schema.dataloader_drop_last, layout),
        resources=stack,
        masters=masters,
        sharded=sharded,
        basic_optimizer=basic,
        mpu=request.mpu,
    )
    _complete(parts, request, stack)
    return DeepSpeedEngine(parts)


def _complete(parts: Parts, request: Request, stack: ExitStack) -> None:
    """Add what is optional: the optimizer's step, schedule, data, activation checkpointing, what watches."""
    schema = parts.config.schema
    if parts.basic_optimizer is not None and parts.masters is not None:
        parts.stepper = Stepper(
            optimizer=parts.basic_optimizer,
            masters=parts.masters,
            reducer=parts.reducer,
            backward=parts.backward,
            scale=parts.scale,
            check_overflow=parts.precision.check_overflow,
            clipping=schema.gradient_clipping,
            report_norm=schema.zero_optimization.compute_grad_norm,
        )
        owner = open_access(parts, parts.basic_optimizer, parts.masters, stack)
        parts.optimizer = _returned_optimizer(parts, parts.basic_optimizer, owner, stack)
    stack.callback(configure_from(schema.activation_checkpointing, parts.layout).close)
    parts.lr_scheduler = make_scheduler(request, parts)
    if request.training_data is not None:
        parts.training_dataloader = parts.make_loader(
            request.training_data,
            batch_size=parts.config.train_micro_batch_size_per_gpu,
            collate_fn=request.collate_fn,
        )
    watch(parts, stack)


def _layout(request: Request, stack: ExitStack) -> ParallelLayout:
    """The layout of the mpu, of the mesh, or all ranks data-parallel."""
    if request.mpu is not None:
        layout = layout_from_mpu(request.mpu)
    elif request.mesh is not None:
        layout = ParallelLayout.from_mesh(request.mesh)
    else:
        layout = ParallelLayout.build()
    stack.callback(layout.close)
    if request.mpu is not None or request.mesh is not None:
        current_layout.set(layout)
        stack.callback(current_layout.forget, layout)
    layout.create_groups("dp", "sp", ("dp", "sp"), "tp", ("pp", "tp"))
    return layout


def _place(module: nn.Module, device: torch.device, precision: Precision, stage: int) -> None:
    """Give the module its device and dtype; shards that it was constructed with follow."""
    put_away(module)
    module.to(device)
    precision.cast_module(module)
    convert_shards(module, stage)


def replicate(module: nn.Module, layout: ParallelLayout) -> None:
    """Give every rank the parameters and buffers of the first rank that holds a copy of the same part."""
    axis = layout["dp", "sp"]
    if axis.size == 1:
        return
    tensors = {id(t): (name, t) for name, t in (*module.named_parameters(), *module.named_buffers())}
    spread(tensors.values(), axis)


@torch.no_grad()
def spread(tensors: Iterable[tuple[str, torch.Tensor]], axis: AxisGroup) -> None:
    """Give every rank of an axis the first one's values of whole tensors."""
    if axis.size == 1:
        return
    whole = [tensor.detach() for _, tensor in tensors if tensor.numel() and shard_of(tensor) is None]
    with comm.labelled("first values of parameters and buffers"):
        broadcast_coalesced(whole, src=axis.ranks[0], group=axis.group)


def is_split(param: nn.Parameter) -> bool:
    """True for a parameter of which model-parallel ranks hold different parts, by the marks Megatron sets."""
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


def make_optimizer(request: Request) -> Optimizer | None:
    """The client's optimizer, else the one of the config, else None."""
    schema = request.config.schema
    given = request.optimizer
    if isinstance(given, Optimizer):
        return given
    parameters = request.model_parameters
    if parameters is None:
        parameters = list(request.module.parameters())  # frozen ones too: they may be unfrozen later
    if given is not None:
        made = given(parameters)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"optimizer: the callable given to deepspeed.initialize returned {type(made).__name__}; it takes the "
                "parameters and returns a torch.optim.Optimizer"
            )
        return made
    if schema.optimizer.type is None or not parameters:
        return None
    if schema.optimizer.params.get("per_head_muon"):
        tag_attention_heads(request.module)
    return build_optimizer(schema.optimizer, parameters, named_parameters=list(request.module.named_parameters()))


def _states(
    request: Request, layout: ParallelLayout, precision: Precision, basic: Optimizer | None, stack: ExitStack
) -> tuple[States | None, Reducer, Sharded | None]:
    """What the optimizer updates and what reduces gradients: shards, or whole where there is nobody to share with."""
    model, axis = layout["pp", "tp"], layout["dp", "sp"]
    model_group = model.group if model.size > 1 else None
    schema = request.config.schema
    zero = schema.zero_optimization
    if axis.size > 1 and (zero.stage == 3 or (zero.stage > 0 and basic is not None)):
        measure = Measure(axis, model_group, is_split, all_used=not zero.ignore_unused_parameters)
        sharded = shard(schema, request.module, precision, basic, measure, stack)
        return sharded.states, sharded.reducer, sharded
    if zero.stage == 3:
        keep_whole(request.module, axis)
    masters = None
    if basic is not None:
        masters = Masters(basic, precision.master, model_group=model_group, is_split=is_split, wide_norm=axis.size > 1)
    return masters, _reducer(request, layout, precision, masters), None


def _reducer(
    request: Request, layout: ParallelLayout, precision: Precision, masters: Masters | None
) -> GradientReducer:
    schema, module = request.config.schema, request.module
    axis = layout["dp", "sp"]
    travels = precision.reduce_dtypes(module)
    slots = [_slot(name, param, precision, travels, masters) for name, param in module.named_parameters()]
    sparse, rows = embedding_parameters(module, all_rows=schema.sparse_gradients)
    holder_of = masters.of if masters is not None else None
    group = axis.group if axis.size > 1 else None
    return GradientReducer(slots, group, axis.size, Weights.of(schema, axis.size), sparse, rows, holder_of)


def _slot(
    name: str,
    param: nn.Parameter,
    precision: Precision,
    travels: dict[nn.Parameter, torch.dtype],
    masters: Masters | None,
) -> Slot:
    wide = masters is not None and param.dtype != precision.accumulate and param.is_floating_point()
    holder = masters.of(param) if wide and masters is not None else param
    own = param.dtype if param.dtype == torch.float32 and precision.param != torch.float32 else precision.reduce
    return Slot(name, param, holder, travels.get(param, own))


def _returned_optimizer(
    parts: Parts, basic: Optimizer, owner: Owner, stack: ExitStack
) -> Optimizer | MixedPrecisionOptimizer:
    """The torch optimizer itself where it updates the model's own parameters with unscaled gradients."""
    assert parts.stepper is not None, "made just before"
    masters = parts.stepper.masters
    plain = isinstance(masters, Masters) and not masters.copies and not parts.config.schema.zero_optimization.stage
    if plain and parts.scale.value == 1.0 and not parts.scale.dynamic:
        return basic
    stack.callback(Modes(basic, masters).close)
    common: dict[str, Any] = {"backward": parts.backward.run, "clip_grad": parts.config.schema.gradient_clipping}
    zero = parts.config.schema.zero_optimization
    if not zero.stage:
        return MixedPrecisionOptimizer(basic, parts.stepper, parts.scale, **common)
    axis = parts.layout["dp", "sp"]
    made = ZeroOptimizer(
        basic, parts.stepper, parts.scale, **common, axis=axis, extend=partial(_extend, parts, owner, axis)
    )
    if zero.stage == 3:
        hooks = parts.sharded.hooks if parts.sharded is not None else None
        made.parameter_offload = ParameterOffload(parts.module, hooks)
        stack.callback(made.parameter_offload.close)
    return made


def _extend(parts: Parts, owner: Owner, axis: AxisGroup, params: list[nn.Parameter]) -> None:
    """Prepare parameters that `add_param_group` brings: equal on all ranks, sharded, hooked, reduced."""
    names = {id(param): name for name, param in parts.module.named_parameters()}
    named = [(names.get(id(param), f"added parameter of shape {tuple(param.shape)}"), param) for param in params]
    spread(named, axis)
    attach(params, owner)
    if parts.sharded is not None:
        parts.sharded.extend(named)
    elif isinstance(parts.reducer, GradientReducer) and isinstance(parts.masters, Masters):
        known = {id(slot.param) for slot in parts.reducer.slots}
        travels = parts.precision.reduce_dtypes(parts.module)
        new = [(name, param) for name, param in named if id(param) not in known]
        parts.reducer.add([_slot(name, param, parts.precision, travels, parts.masters) for name, param in new])


def make_scheduler(request: Request, parts: Parts) -> Any:
    """The client's schedule, made or called, else the one of the config, else None."""
    given, section = request.lr_scheduler, parts.config.schema.scheduler
    if given is None:
        return build_scheduler(section, parts.basic_optimizer) if section.type and parts.basic_optimizer else None
    if callable(given) and not hasattr(given, "step"):
        if parts.basic_optimizer is None:
            raise UsageError("lr_scheduler: a callable was given, but there is no optimizer to call it with")
        return given(parts.basic_optimizer)
    if not isinstance(request.optimizer, Optimizer):
        raise UsageError(
            f"lr_scheduler: a ready {type(given).__name__} was given without the optimizer that it acts on. Pass that "
            "optimizer too, or a callable that takes the optimizer and returns the schedule."
        )
    return given


def _forward(module: nn.Module, precision: Precision, hooks: ModuleHooks | None) -> Callable[..., Any]:
    """How the engine calls the module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if hooks is not None:
            hooks.look_again()
        cast_args, cast_kwargs = precision.cast_inputs(args, kwargs)
        with precision.forward_context():
            return module(*cast_args, **cast_kwargs)

    return call


def _loader_maker(drop_last: bool, layout: ParallelLayout) -> Callable[..., Any]:
    def make(dataset: Any, **options: Any) -> Any:
        return build_dataloader(
            dataset,
            data_parallel_rank=layout["dp"].rank,
            data_parallel_size=layout["dp"].size,
            drop_last=drop_last,
            **options,
        )

    return make
