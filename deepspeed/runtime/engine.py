"""`DeepSpeedEngine`: forward, backward, step. It owns its collaborators; none of them owns the engine."""

from __future__ import annotations

import atexit
import gc
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.comm import Pending
from deepspeed.comm.watch.threads import here
from deepspeed.compile.contracts import PassRegistry
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.batch import resolve
from deepspeed.config.zero import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.data.pacing import set_custom_schedules
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.events import OverflowFound, Phase, StepFinished
from deepspeed.log import NOTICE, log_dist, logger, warn_once
from deepspeed.parallel.axes import SAMPLE_AXES
from deepspeed.runtime import getters, patches
from deepspeed.runtime.compile_blocks import compile_module
from deepspeed.runtime.deep_compile import DeepCompile, deep_compile
from deepspeed.runtime.destroyed import Destroyed, close
from deepspeed.runtime.lr_schedules import require_metric, step_schedule
from deepspeed.runtime.offload_states import move_states, require_here, return_states
from deepspeed.runtime.out_of_memory import held_tensors
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.phases import phase
from deepspeed.runtime.place_module import refuse_forward
from deepspeed.runtime.saving.checkpoints import Checkpoints
from deepspeed.runtime.saving.methods import CheckpointMethods
from deepspeed.runtime.step.stepper import StepOutcome
from deepspeed.zero.interface import numel_of
from deepspeed.zero.public.access import safe_get_full_fp32_param, safe_get_full_grad

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(CheckpointMethods, nn.Module):
    """A module that trains as its config says.

    `engine(batch)`, `engine.backward(loss)` and `engine.step()` after every micro batch; a plain `loss.backward()` in
    place of the second works too. Attributes it does not have are those of the module.
    """

    _parts: Parts
    _config: DeepSpeedConfig
    _collaborators: tuple[str, ...] = ("_parts", "_checkpoints")
    """What `destroy` takes away."""
    _facts: ClassVar = getters.FACTS

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.module
        self._parts = parts
        self._config = parts.config
        self.device = parts.device
        self.local_rank = parts.local_rank
        self.events = parts.events
        self.optimizer = parts.optimizer
        self.basic_optimizer = parts.basic_optimizer
        self.lr_scheduler = parts.lr_scheduler
        self.training_dataloader = parts.training_dataloader
        self.monitor = parts.monitor
        self.mpu = parts.mpu
        self.timers = parts.timers
        self.tput_timer = parts.tput_timer
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._outcome: StepOutcome | None = None
        self._applied = False
        self._passes = PassRegistry()
        self._deep: DeepCompile | None = None
        self.skipped_in_a_row = 0
        self.loss_of_step: Any = None
        self.training = parts.module.training
        self._checkpoints = Checkpoints(parts)
        self._plug_in()
        patches.heed(self, DeepSpeedEngine)
        _log_start(parts)
        self._log_end = _logs_end(self)

    # ---- the loop

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output."""
        parts = self._parts
        if parts.moved:
            self._must_be_here("engine.forward()", trains=torch.is_grad_enabled())
        if parts.pacing is not None and self.training:
            parts.pacing.enter(self.global_steps, self.micro_steps)
            inputs, kwargs = parts.pacing.arguments(inputs, kwargs)
        if not torch.is_grad_enabled():
            return parts.forward(*inputs, **kwargs)
        if not self.training:
            outputs = parts.forward(*inputs, **kwargs)
            parts.backward.watch(outputs)
            return outputs
        self._look_for_unfrozen()
        with phase(self.events, Phase.FORWARD, parts.accumulation):
            outputs = parts.forward(*inputs, **kwargs)
        parts.backward.watch(outputs)
        return outputs

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Differentiate the loss; it is divided by the accumulation steps unless `scale_wrt_gas` is False.

        Returns the loss that was used, without the loss scale.
        """
        parts = self._parts
        if parts.moved:
            self._must_be_here("engine.backward()", trains=True)
        if parts.pacing is not None and parts.accumulation.at_boundary:
            parts.pacing.before_backward(loss, parts.scale.value)
        with phase(self.events, Phase.BACKWARD, parts.accumulation):
            used = parts.backward.run(loss, retain_graph=retain_graph, divide=scale_wrt_gas)
        if self.events.wants(StepFinished):
            self.loss_of_step = used if self.loss_of_step is None else self.loss_of_step + used
        return used

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro step; at the accumulation boundary, take an optimizer step."""
        parts = self._parts
        if parts.backward.suspended:
            raise DeepSpeedError(
                "engine.step() was called inside no_sync() or coalesce_grad_reduction(), where gradients of the ranks "
                "are not reduced yet; leave the context first"
            )
        self._applied = False
        if parts.moved:
            self._must_be_here("engine.step()", trains=True, steps=True)
        if parts.accumulation.at_boundary:
            self._checkpoints.must_be_whole("engine.step()")
            with phase(self.events, Phase.STEP, parts.accumulation):
                self._take_step(lr_kwargs or {})
        parts.accumulation.advance()

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        stepper = self._parts.stepper
        if stepper is None:
            raise DeepSpeedConfigError(
                "engine.step() needs an optimizer: pass one to deepspeed.initialize(optimizer=...), or add the section "
                "'optimizer' to the config",
                path="optimizer",
            )
        require_metric(self.lr_scheduler, lr_kwargs)
        used_lr, used_momentum = tuple(self.get_lr()), tuple(self.get_mom())
        ran = self._parts.backward.has_gradients
        if self._parts.pacing is not None and ran:
            self._parts.pacing.before_step(safe_get_full_grad, safe_get_full_fp32_param)
        taken = getattr(self.optimizer, "take_step", stepper.step)
        outcome = self._outcome = taken()
        self._applied = outcome.applied
        if outcome.empty:
            warn_once(_without_gradients(after_backward=ran))
            self.loss_of_step = None
            return
        self.global_steps += 1
        if self._parts.pacing is not None:
            self._parts.pacing.went_to(self.global_steps)
        micro_batches = self._parts.accumulation.micro_batches
        self.global_samples += micro_batches * self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if outcome.applied:
            self.skipped_in_a_row = 0
            if self.lr_scheduler is not None:
                step_schedule(self.lr_scheduler, lr_kwargs, self.train_batch_size())
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            if self.events.wants(OverflowFound):
                found = OverflowFound(
                    step=self.global_steps,
                    scale_before=outcome.scale_before,
                    scale_after=outcome.scale_after,
                    scaled=self._scaled(outcome),
                    in_a_row=self.skipped_in_a_row,
                )
                self.events.emit(found)
        if self.events.wants(StepFinished):
            self.events.emit(self._finished_event(outcome, used_lr, used_momentum))
        self.loss_of_step = None

    def _finished_event(self, outcome: StepOutcome, lr: tuple[float, ...], momentum: tuple[Any, ...]) -> StepFinished:
        """`lr` and `momentum` are those that the step was taken with."""
        loss = self.loss_of_step
        return StepFinished(
            step=self.global_steps,
            samples=self.global_samples,
            applied=outcome.applied,
            skipped_steps=self.skipped_steps,
            lr=lr,
            momentum=momentum,
            loss_scale=outcome.scale_before if self._scaled(outcome) else None,
            find_grad_norm=outcome.norm.wait,
            find_loss=loss.wait if isinstance(loss, Pending) else lambda: loss,
        )

    def _scaled(self, outcome: StepOutcome) -> bool:
        return self._parts.scale.dynamic or outcome.scale_before != 1.0

    def _look_for_unfrozen(self) -> None:
        """Parameters that were unfrozen since the last step begin to train."""
        if self._parts.states is not None:
            self._parts.states.refresh()
        self._parts.reducer.refresh()

    # ---- accumulation

    @property
    def micro_steps(self) -> int:
        """Micro steps since training began."""
        return self._parts.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self._parts.accumulation.micro_steps = value

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the coming call of `step` takes an optimizer step; after the call it is about the next micro step."""
        return self._parts.accumulation.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand whether the coming micro step ends with an optimizer step; holds until set again."""
        self._parts.accumulation.override(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate on this rank; the first one outside reduces everything."""
        return self._suspended("no_sync")

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backward passes, one reduction when the block ends."""
        if not self._parts.accumulation.managed:
            raise DeepSpeedConfigError(
                "coalesce_grad_reduction() has no meaning with managed_gradient_accumulation false: gradients are "
                "reduced once, in engine.step()",
                path="managed_gradient_accumulation",
            )
        with self._suspended("coalesce_grad_reduction"):
            yield
        if self._parts.accumulation.at_boundary:
            self._parts.reducer.finish()

    @contextmanager
    def _suspended(self, name: str) -> Iterator[None]:
        backward = self._parts.backward
        if backward.suspended:
            raise DeepSpeedError(f"{name}() was entered inside no_sync() or coalesce_grad_reduction(); use one of them")
        backward.suspended = True
        try:
            yield
        finally:
            backward.suspended = False

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for `engine.scale(loss).backward()`."""
        return self._parts.backward.scaled(loss)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce the gradients now, if that has not happened yet."""
        self._parts.reducer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        if self._parts.stepper is not None:
            self._parts.stepper.drop_gradients()
            return
        self._parts.backward.forget()
        for param in self.module.parameters():
            param.grad = None

    # ---- what happened

    def was_step_applied(self) -> bool:
        """True if the last call of `step` updated the parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last optimizer step's gradients before clipping; None before the first."""
        norm = None if self._outcome is None else self._outcome.grad_norm
        return None if norm is None else float(norm)

    def get_lr(self) -> list[Any]:
        """The learning rate of each parameter group."""
        return self._hyperparameters("lr")

    def get_type(self) -> list[Any]:
        """The type of each parameter group, where groups have one."""
        return self._hyperparameters("type")

    def get_mom(self) -> list[Any]:
        """The momentum or betas of each parameter group."""
        groups = self.basic_optimizer.param_groups if self.basic_optimizer is not None else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    def _hyperparameters(self, name: str) -> list[Any]:
        groups = self.basic_optimizer.param_groups if self.basic_optimizer is not None else []
        return [group.get(name) for group in groups]

    def loss_scale(self) -> float:
        """The loss scale that the next backward uses; 1 where the loss is not scaled."""
        return self._parts.scale.value

    # ---- batch sizes and data

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all data-parallel ranks."""
        return self.get_batch_info()[0]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro step."""
        return self.get_batch_info()[1]

    def gradient_accumulation_steps(self) -> int:
        """Micro steps per optimizer step."""
        return self.get_batch_info()[2]

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        batch = self._parts.batch
        if batch is None:
            raise DeepSpeedConfigError("this engine was built without batch sizes", path="train_batch_size")
        return batch.train, batch.micro, batch.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per optimizer step by changing the accumulation steps."""
        self._resize(train=train_batch_size, micro=self.train_micro_batch_size_per_gpu(), steps=None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per micro step; the accumulation steps stay."""
        self._resize(train=None, micro=micro_batch_size, steps=self.gradient_accumulation_steps())

    def _resize(self, *, train: int | None, micro: int, steps: int | None) -> None:
        batch = self._parts.batch = resolve(train, micro, steps, self.dp_world_size)
        self._parts.accumulation.steps = batch.steps

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A data loader whose ranks each see their own part of `dataset`."""
        return self._parts.make_loader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
        )

    def set_data_post_process_func(self, post_process_func: Callable[[Any, Any], Any]) -> None:
        """Pass every batch of the training data loader through `post_process_func(batch, loader_state)`."""
        if self.training_dataloader is None:
            raise DeepSpeedError(
                "set_data_post_process_func() acts on the engine's own data loader, and this engine has none; pass "
                "training_data to deepspeed.initialize"
            )
        self.training_dataloader.post_process_func = post_process_func

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Give metrics whose schedule_type is custom their functions: metric → difficulty at a step."""
        set_custom_schedules(schedule_func_dict, self._parts.pacing, self.training_dataloader)

    # ---- layout

    @property
    def config(self) -> dict[str, Any]:
        return self._config.loaded.raw

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self._config.world_size

    # ---- states in host memory for a while

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move optimizer states, masters, parameters and gradients, or what is included of these, to host memory.

        A model whose parameters stay can be evaluated meanwhile. `reload_states` brings all back to where it was. With
        `non_blocking` the host may read what was moved only after the device was synchronised.
        """
        move_states(self._parts, include, OffloadDeviceEnum(device), pinned=pin_memory, blocking=not non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring everything that `offload_states` moved back to the device; harmless if that is nothing."""
        return_states(self._parts, blocking=not non_blocking)

    def _must_be_here(self, call: str, *, trains: bool, steps: bool = False) -> None:
        """Refuse what needs states that are away."""
        require_here(self._parts.moved, call, trains=trains, steps=steps)

    # ---- life

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module with torch.compile, or its repeated blocks (`compile.region`); once is enough.

        With `compile.deepcompile`: `schedule` is [(step, [passes by name or function])]; None is that of the stage.
        """
        deep = self.is_deepcompile_enabled()
        if schedule is not None and not deep:
            raise DeepSpeedConfigError(
                "engine.compile(schedule=...) says when passes apply, but compile.deepcompile is false; set it to true",
                path="compile.deepcompile",
            )
        if deep and compiled_autograd_enabled:
            raise DeepSpeedConfigError(
                "engine.compile(compiled_autograd_enabled=True) does not work with compile.deepcompile, whose passes "
                "see backward as torch.compile splits it; turn one of them off",
                path="compile.deepcompile",
            )
        if self.is_compiled:
            return
        options = dict(compile_kwargs or {})
        if deep:
            self._deep = deep_compile(
                self._parts, self._passes, backend, options, schedule, lambda: int(self.global_steps)
            )
        if backend is not None:
            options["backend"] = backend
        if compiled_autograd_enabled:
            torch._dynamo.config.compiled_autograd = True
        if self._deep is None:
            compile_module(self._parts, options)
        self._compiled = True
        if self._parts.states is not None:
            self._parts.states.compiled = True

    @property
    def is_compiled(self) -> bool:
        """True once `compile` was called."""
        return bool(self.__dict__.get("_compiled", False))

    def is_deepcompile_enabled(self) -> bool:
        """True if the config asks for DeepCompile."""
        return self._config.schema.compile.deepcompile

    def is_deepcompile_active(self) -> bool:
        """True once `compile` has made DeepCompile run the model."""
        return self._deep is not None

    def register_compile_pass(self, pass_name: str, pass_fn: Callable[[Any], None], contract: Any = None) -> None:
        """Make a pass of DeepCompile known by a name; `contract` says what it needs and provides."""
        self._passes.register(pass_name, pass_fn, contract)

    def get_compile_time(self) -> float:
        """Seconds spent so far in DeepCompile's passes and in the compilers of their graphs."""
        return 0.0 if self._deep is None else self._deep.seconds

    def collect_python_gc(self) -> int:
        """Run Python's garbage collector once, for runs that have it off."""
        return gc.collect()

    def destroy(self) -> None:
        """Remove hooks, close monitors and groups, and let go of optimizer and states; harmless twice."""
        if isinstance(self._parts, Destroyed):
            return
        self._log_end()
        place = here()
        gone = Destroyed(self._parts, place)
        try:
            close(self._parts)
            refuse_forward(self.module, place)
        finally:
            self.optimizer = self.basic_optimizer = self.lr_scheduler = None
            for name in self._collaborators:
                setattr(self, name, gone)

    def clip_fp32_gradients(self) -> None:
        """Clip the gradients of a model in fp32; a script's own method is used in the step in place of this one."""
        nn.utils.clip_grad_norm_(self.module.parameters(), self._config.schema.gradient_clipping)

    def _report_progress(self, step: int) -> None:
        """Log a line about a step; a script's own method is used in place of the line of `steps_per_print`."""
        log_dist(f"step={step}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}")

    def __getattr__(self, name: str) -> Any:
        getter = self._facts.get(name) or getters.find(name)
        if getter is not None:
            return getter(self)
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(f"neither the engine nor {type(module).__name__} has an attribute {name!r}") from None


for _name in patches.NOT_CALLED:
    setattr(DeepSpeedEngine, _name, patches.NotCalled(_name))


def _without_gradients(*, after_backward: bool) -> str:
    """What to say of a step for which no rank had a gradient."""
    if after_backward:
        found = (
            "engine.step() was called after a backward in which no rank has had a gradient of what the optimizer trains"
        )
        advice = "Let the loss depend on parameters of the optimizer that require gradients"
    else:
        found = "engine.step() was called, but no rank has had a gradient since the last step"
        advice = "Call engine.backward(loss) first"
    return f"{found}: nothing was updated, and no step is counted. {advice}."


def _log_start(parts: Parts) -> None:
    """Log the model, its parameters, the ranks, stage, precision, and what this rank holds."""
    if not logger.isEnabledFor(NOTICE):
        return
    parameters = list(parts.module.parameters())
    count = sum(map(numel_of, parameters))
    trained = sum(numel_of(param) for param in parameters if param.requires_grad)
    sizes = {name: size for name, size in parts.layout.sizes.items() if size > 1}
    spread = ", ".join(f"{name} {size}" for name, size in sizes.items())
    whole = parts.experts is None and sizes.keys() <= set(SAMPLE_AXES)
    held = {each.untyped_storage().data_ptr(): each for kind in held_tensors(parts).values() for each in kind}
    size = sum(each.untyped_storage().nbytes() for each in held.values())
    log_dist(
        f"{type(parts.module).__name__}: {count:,} parameters{'' if whole else ' on rank 0'}, {trained:,} trained; "
        f"{comm.get_world_size()} ranks{f' ({spread})' if spread else ''}; ZeRO stage "
        f"{int(parts.config.schema.zero_optimization.stage)}; {parts.precision.describe()}; {gibibytes(size)} held by "
        "rank 0 before the first step",
        level=NOTICE,
    )


def _logs_end(engine: DeepSpeedEngine) -> Callable[[], None]:
    """What logs how far the engine came: called once, by `destroy` or else when the program ends."""
    began, alive = time.perf_counter(), weakref.ref(engine)

    def tell() -> None:
        atexit.unregister(tell)
        ended = alive()
        if ended is None or isinstance(ended._parts, Destroyed) or ended.global_steps == 0:
            return  # nothing was trained
        skipped = f" ({ended.skipped_steps} skipped)" if ended.skipped_steps else ""
        peak = gibibytes(get_accelerator().max_memory_allocated())
        log_dist(
            f"{type(ended.module).__name__}: ended at step {ended.global_steps}{skipped} after "
            f"{ended.global_samples:,} samples, {time.perf_counter() - began:.1f} s after it began; peak memory {peak} "
            "on rank 0",
            level=NOTICE,
        )

    atexit.register(tell)
    return tell
