"""The composition root: a request of the user → collaborators → engine. A failure on the way leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed._assemble.observers import watch, watch_hangs
from deepspeed.checkpoint.pretrained import fill, take_place
from deepspeed.compression.build import compression_of_engine, require_trained, watch_curvature
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.features import unused_by_model
from deepspeed.data.loader import CurriculumDataLoader
from deepspeed.data.pacing import Pacing, pacing_of
from deepspeed.data.sampler import DeepSpeedDataSampler
from deepspeed.errors import UsageError
from deepspeed.events import EventStream
from deepspeed.fusion.build import fuse
from deepspeed.hybrid.engine import DeepSpeedHybridEngine
from deepspeed.linear.context_manager import quantise_named, settle
from deepspeed.log import set_log_level_from_string
from deepspeed.moe.placement import cuts_of_experts, spread_experts
from deepspeed.moe.utils import split_experts
from deepspeed.ops.onebit.base import OneBitOptimizer
from deepspeed.ops.precompile import KernelPrecompiler
from deepspeed.ops.sparse_attention.sparse_self_attention import give_patterns
from deepspeed.parallel import ParallelLayout, layout_from_mpu
from deepspeed.parallel.mpu import current_layout
from deepspeed.pipe.axes import model_kind
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
    require_real,
    returned_optimizer,
    schedule_by_tokens,
    warn_without_optimizer,
)
from deepspeed.runtime.step.in_backward import update_in_backward
from deepspeed.runtime.step.optimizers import hold_states, require_tested
from deepspeed.runtime.step.state_access import open_access
from deepspeed.runtime.step.stepper import Stepper, step_scenes
from deepspeed.sequence.tiling import tile_model
from deepspeed.tensor_parallel import SplitModel, cuts_of
from deepspeed.zero.agreement import digest
from deepspeed.zero.birth.placement import rank_device
from deepspeed.zero.build import StateBuilder
from deepspeed.zero.interface import LiesOn, NormRanks, RankAgreement, Reshard, ShardAxes
from deepspeed.zero.offload import budget, parameters_leave

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
        engine = _Assembly(request, stack).build()
        engine._parts.resources = stack.pop_all()
        return engine


class _Assembly:
    """One engine as it is built: `build` lists the steps, each of which uses what those before it left here."""

    def __init__(self, request: Request, stack: ExitStack) -> None:
        self.request, self.stack = request, stack
        self.config, self.module = request.config, request.module
        self.schema = request.config.schema
        self.zero = self.schema.zero_optimization
        self.kind = model_kind(request.module)

    def build(self) -> DeepSpeedEngine:
        if self.schema.log_level is not None:
            set_log_level_from_string(self.schema.log_level)
        watch_hangs(self.schema)  # first: groups that are made from now on wait as long as it says
        self.layout = self._layout()
        self.compression = compression_of_engine(self.schema, self.module, self.request.mpu, whole=self.kind.whole)
        give_patterns(self.schema.sparse_attention, self.module, whole=self.kind.whole)
        self.precision = Precision.from_config(self.schema, sequence_size=self.layout.sequence.size)
        quantise_named(self.module, self.schema.weight_quantization)
        settle(self.module, self.precision.param, self.layout)
        self.split = self._split()
        self.local_rank, self.device = rank_device()
        self.precision.require_device()
        self.precompiler = self._precompiler()
        fuse(self.schema, self.module, self.stack, self.precompiler, self.precision.param, whole=self.kind.whole)
        self.remote = self.zero.offloads_parameters or parameters_leave(
            self.schema, self.module, self.precision, self.layout.samples
        )
        place(self.module, self.device, self.precision, self.zero, remote=self.remote)
        self._spread_experts()
        replicate(self.module, self.lies_on, remote=self.remote)
        self.optimizer = self._optimizer()
        if self.compression is not None:
            require_trained(self.module, self.optimizer)
            alike = self.kind.whole and self.experts is None
            watch_curvature(self.compression, self.schema, self.module, self.layout, alike=alike)
        self._hold_states()
        parts = self._parts()
        self.kind.warn_if_frozen(self.optimizer)
        self._add_step(parts)
        self.stack.callback(configure_from(self.schema.activation_checkpointing, self.layout))
        parts.lr_scheduler = choose_scheduler(
            self.schema.scheduler, self.request.lr_scheduler, self.request.optimizer, self.optimizer
        )
        self._add_data(parts)
        self._add_pacing(parts)
        watch(parts, self.stack)
        return DeepSpeedHybridEngine(parts) if self.schema.hybrid_engine.enabled else self.kind.engine(parts)

    def _layout(self) -> ParallelLayout:
        """The layout of the mpu, of the mesh, or of the sizes in the config."""
        request, sizes = self.request, self.schema.axis_sizes
        if request.mpu is not None:
            layout = layout_from_mpu(request.mpu)
        elif request.mesh is not None:
            layout = ParallelLayout.from_mesh(request.mesh)
        else:
            layout = ParallelLayout.build(**sizes)
        self.stack.callback(layout.close)
        if request.mpu is not None or request.mesh is not None or max(sizes.values()) > 1:
            current_layout.set(layout)
            self.stack.callback(current_layout.forget, layout)
        layout.create_groups()
        return layout

    def _split(self) -> SplitModel:
        """Split the layers and blocks of experts that ranks share, and read the values of a model without any."""
        empty = take_place(self.module)
        samples = self.layout.samples
        shards = ShardAxes(lambda _: samples, self.zero.mics_shard_size if self.zero.shards_parameters else -1)
        split = self.kind.split(self.schema, self.layout, Reshard(shards.levels(samples)[0]), self.request.mpu)
        fill(self.module, empty, cuts_of_experts(self.module), cuts_of(self.module, self.layout.tensor.rank))
        return split

    def _precompiler(self) -> KernelPrecompiler | None:
        """What compiles kernels while the engine is put together; autocast decides on dtypes too late for that."""
        made = None if self.precision.autocast is not None else KernelPrecompiler.on(self.device)
        if made is not None:
            self.stack.callback(made.close)
        return made

    def _spread_experts(self) -> None:
        """Join the experts of the model to their ranks, and log keys that have no effect on such a model."""
        first, samples = self.schema.use_data_before_expert_parallelism, self.layout.samples
        experts = self.experts = spread_experts(self.module, self.layout, self.stack, data_first=first)
        self.lies_on: LiesOn = (lambda _: samples) if experts is None else experts.lies_on
        shared = self.layout.sequence.size > 1
        self.config.warn_unused(
            unused_by_model(staged=not self.kind.whole, experts=experts is not None, shared_sequences=shared)
        )
        self.kind.export_experts(experts, self.stack)

    def _optimizer(self) -> Optimizer | None:
        """The optimizer that was given or is asked for; None where there is none."""
        parameters = split_experts(self.request.model_parameters, self.module)
        basic = choose_optimizer(self.schema, self.request.optimizer, parameters, self.module)
        if basic is None:
            warn_without_optimizer(self.schema, self.request.training_data)
            return None
        require_real(basic, self.module)
        if self.zero.shards_states:
            require_tested(basic, allowed=self.schema.zero_allow_untested_optimizer)
        hold_states(basic, self.precision)
        return basic

    def _hold_states(self) -> None:
        """What the optimizer updates and what reduces gradients, whole or spread over ranks."""
        experts, layout, axis = self.experts, self.layout, self.layout.samples
        measure = NormRanks(
            axis,
            layout.model.group if layout.model.size > 1 else None,
            self._is_split,
            all_used=not self.zero.ignore_unused_parameters,
            elsewhere=self.split.elsewhere,
            lies_on=None if experts is None else experts.lies_on,
        )
        measure = self.kind.measure(measure, layout)
        hosts = RankAgreement(layout.stage if experts is not None and experts.wide else axis)
        if experts is not None and self.zero.shards_states:
            self._require_alike(experts.frozen(self.module), hosts)
        planned = budget(self.schema, self.module, self.precision, self.optimizer, axis, hosts)
        held = self.held = StateBuilder(
            self.schema,
            self.module,
            self.precision,
            self.optimizer,
            measure,
            layout.alone,
            hosts,
            self.stack,
            planned,
            self.config.batch.steps if self.config.batch is not None else 1,
        ).build()
        if self.precompiler is not None and self.optimizer is not None and held.states is not None:
            self.precompiler.add(step_scenes(self.optimizer, held.states, self.precision.accumulate))
        self.stack.callback(held.close)

    def _is_split(self, param: nn.Parameter) -> bool:
        """True for a parameter of which model-parallel ranks hold different parts, by the marks Megatron sets."""
        marked = getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False)
        return bool(marked) or (self.experts is not None and self.experts.crosses(param))

    @staticmethod
    def _require_alike(frozen: Sequence[str], hosts: RankAgreement) -> None:
        """Refuse ranks that train other parameters of their experts than others do: ranks number them alike."""
        digests = hosts.exchange([digest(frozen)], "experts that are trained")[:, 0].tolist()
        other = next((rank for rank, word in enumerate(digests) if word != digests[0]), None)
        if other is not None:
            raise UsageError(
                f"some ranks train other parameters of their experts than rank 0 does (the first is rank {other} of "
                f"those that share data); frozen on this one: {', '.join(frozen[:4]) or 'none'}"
                f"{', …' * (len(frozen) > 4)}. From zero_optimization.stage 1 on, freeze the same parameters of all "
                "experts of a layer, or use stage 0"
            )

    def _parts(self) -> Parts:
        batch, held = self.config.batch, self.held
        assert batch is not None, "a config that is not partial has its batch sizes"
        accumulation = Accumulation(batch.steps, managed=self.schema.managed_gradient_accumulation)
        events, scale = EventStream(), make_scale(self.schema, self.precision)
        backward = Backward(
            held.reducer,
            accumulation,
            scale,
            events,
            module=self.module,
            listens=self.optimizer is not None,
        )
        return Parts(
            config=self.config,
            module=self.module,
            kind=self.kind,
            device=self.device,
            local_rank=self.local_rank,
            layout=self.layout,
            precision=self.precision,
            scale=scale,
            accumulation=accumulation,
            reducer=held.reducer,
            backward=backward,
            events=events,
            forward=self._forward(),
            make_loader=partial(
                build_dataloader,
                data_parallel_rank=self.layout.data.rank,
                data_parallel_size=self.layout.data.size,
                drop_last=self.schema.dataloader_drop_last,
            ),
            resources=self.stack,
            lies_on=self.lies_on,
            experts=self.experts,
            states=held.states,
            sharded=held,
            basic_optimizer=self.optimizer,
            mpu=self.request.mpu,
        )

    def _forward(self) -> Callable[..., Any]:
        """How the engine calls the module: what the config puts around it, from the inside to the outside."""
        schema, split = self.schema, self.split
        forward = keep_hidden_states(schema.activation_checkpointing, self.module, self._call())
        entrance = None if split.entrances is None else split.entrances.take
        forward = tile_model(schema.sequence_parallel, self.module, self.stack, forward, split.tile_loss, entrance)
        return self.kind.share_sequences(schema, self.layout, self.stack, forward, split.heads)

    def _call(self) -> Callable[..., Any]:
        module, precision, hooks, check_inputs = self.module, self.precision, self.held.hooks, self.split.check

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

    def _add_step(self, parts: Parts) -> None:
        """What updates parameters, and the optimizer that the script gets."""
        basic, states = self.optimizer, self.held.states
        if basic is None or states is None:
            return
        self.stack.callback(states.end_norm)
        owner = open_access(parts, basic, states, self.stack)
        updates = parts.backward.updates = update_in_backward(parts, basic, states)
        if updates is not None:
            self.stack.callback(updates.close)
        parts.stepper = Stepper(
            optimizer=basic,
            states=states,
            owner=owner,
            reducer=parts.reducer,
            backward=parts.backward,
            scale=parts.scale,
            check_overflow=self.precision.check_overflow or isinstance(basic, OneBitOptimizer),
            clipping=self.schema.gradient_clipping,
            report_norm=self.zero.compute_grad_norm,
            stop=self.schema.nonfinite_gradients == "stop",
            parameters=parts.backward.parameters,
            in_backward=updates,
        )
        parts.optimizer = returned_optimizer(parts, basic, parts.stepper, owner, self.stack)

    def _add_pacing(self, parts: Parts) -> None:
        """What changes with the step, and a learning rate by the tokens that layers saw."""
        batch = self.config.batch
        parts.pacing = pacing_of(
            self.schema,
            self.module,
            self.kind.blocks,
            whole=self.kind.whole,
            rank=self.layout.data.rank,
            samples=1 if batch is None else batch.train,
            stack=self.stack,
        )
        if self.compression is not None:
            parts.pacing = parts.pacing or Pacing()
            parts.pacing.compression = self.compression
        routing = self.schema.data_efficiency.random_ltd
        if routing is not None and routing.layer_token_lr_schedule.enabled and parts.pacing is not None:
            parts.lr_scheduler = schedule_by_tokens(
                routing.layer_token_lr_schedule, parts.lr_scheduler, self.optimizer, parts.pacing.tokens
            )

    def _add_data(self, parts: Parts) -> None:
        data, states = self.request.training_data, self.held.states
        if data is None:
            return
        if self.schema.data_efficiency.curriculum is not None:
            parts.training_dataloader = self._by_difficulty(data)
            return
        loader = parts.training_dataloader = parts.make_loader(
            data,
            batch_size=self.config.train_micro_batch_size_per_gpu,
            collate_fn=self.request.collate_fn,
            shuffle=self.kind.whole,  # as DeepSpeed: the data of a pipeline may be grouped, by length say
        )
        if states is not None and states.deferral is not None and hasattr(data, "__len__"):
            states.deferral.schedule.know_epoch(len(loader) // parts.accumulation.steps)

    def _by_difficulty(self, data: Any) -> CurriculumDataLoader:
        """The loader of `data_efficiency.data_sampling.curriculum_learning`."""
        section, batch, ranks = self.schema.data_efficiency, self.config.batch, self.layout.data
        assert batch is not None, "a config that is not partial has its batch sizes"
        sampler = DeepSpeedDataSampler(
            section, len(data), batch.micro, ranks.rank, ranks.size, ranks.group, batch.steps, comm.get_rank()
        )
        metrics = section.data_sampling.curriculum_learning.curriculum_metrics
        return CurriculumDataLoader(
            data,
            sampler,
            workers=section.data_sampling.num_workers,
            collate_fn=self.request.collate_fn,
            cuts=tuple(name for name, each in metrics.items() if each.cut_batches),
        )
