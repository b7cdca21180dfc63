"""`DeepSpeedEngine`: forward, backward, step. It owns its collaborators; none of them owns the engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.watch.look import here
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.events import OverflowFound, Phase, StepFinished
from deepspeed.log import warn_once
from deepspeed.runtime import getters, news
from deepspeed.runtime.destroyed import Destroyed, close
from deepspeed.runtime.model_methods import ModelMethods
from deepspeed.runtime.moving import MovingMethods
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.phases import phase
from deepspeed.runtime.regions import compile_module
from deepspeed.runtime.saving.checkpoints import Checkpoints
from deepspeed.runtime.saving.methods import CheckpointMethods
from deepspeed.runtime.step.schedule import require_metric, step_schedule
from deepspeed.runtime.step.stepper import Outcome
from deepspeed.runtime.summary import log_start, logs_end

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(CheckpointMethods, ModelMethods, MovingMethods, nn.Module):
    """A module that trains as its config says.

    `engine(batch)`, `engine.backward(loss)` and `engine.step()` after every micro batch; a plain `loss.backward()` in
    place of the second works too. Attributes it does not have are those of the module.
    """

    _parts: Parts
    _config: DeepSpeedConfig
    _collaborators: tuple[str, ...] = ("_parts", "_checkpoints")
    """What `destroy` takes away."""

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
        self._outcome: Outcome | None = None
        self._applied = False
        self.skipped_in_a_row = 0
        self.loss_of_step: Any = None
        self.training = parts.module.training
        self._checkpoints = Checkpoints(parts)
        log_start(parts)
        self._log_end = logs_end(self)

    # ---- the loop

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output."""
        parts = self._parts
        if parts.moved:
            self._must_be_here("engine.forward()", trains=torch.is_grad_enabled())
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
        taken = getattr(self.optimizer, "take_step", stepper.step)
        outcome = self._outcome = taken()
        self._applied = outcome.applied
        if outcome.empty:
            warn_once(news.without_gradients(after_backward=ran))
            self.loss_of_step = None
            return
        self.global_steps += 1
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
                self.events.emit(news.overflow(self, outcome))
        if self.events.wants(StepFinished):
            self.events.emit(news.finished(self, outcome, used_lr, used_momentum))
        self.loss_of_step = None

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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate on this rank; the first one outside reduces everything."""
        with self._suspended("no_sync"):
            yield

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
            self._parts.stepper.zero_grad()
        else:
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
        return self._batch_info()[0]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro step."""
        return self._batch_info()[1]

    def gradient_accumulation_steps(self) -> int:
        """Micro steps per optimizer step."""
        return self._batch_info()[2]

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return self._batch_info()

    def _batch_info(self) -> tuple[int, int, int]:
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
        from deepspeed.config.batch import resolve

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

    # ---- layout

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was given."""
        return self._config.loaded.raw

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self._config.world_size

    # ---- life

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module with torch.compile, or its repeated blocks (`compile.region`); once is enough."""
        if schedule is not None:
            raise DeepSpeedConfigError("a schedule needs DeepCompile, not part of this version yet", path="compile")
        if self.is_compiled:
            return
        options = dict(compile_kwargs or {})
        if backend is not None:
            options["backend"] = backend
        if compiled_autograd_enabled:
            torch._dynamo.config.compiled_autograd = True
        compile_module(self._parts, options)
        self._compiled = True
        if self._parts.states is not None:
            self._parts.states.compiled = True

    @property
    def is_compiled(self) -> bool:
        """True once `compile` was called."""
        return bool(self.__dict__.get("_compiled", False))

    def collect_python_gc(self) -> int:
        """Run Python's garbage collector once, for runs that have it off."""
        return gc.collect()

    def destroy(self) -> None:
        """Remove hooks, close monitors and groups, and let go of optimizer and states; harmless twice."""
        if isinstance(self._parts, Destroyed):
            return
        self._log_end()
        gone = Destroyed(self._parts, here())
        try:
            close(self._parts)
        finally:
            self.optimizer = self.basic_optimizer = self.lr_scheduler = None
            for name in self._collaborators:
                setattr(self, name, gone)

    def __getattr__(self, name: str) -> Any:
        getter = getters.find(name)
        if getter is not None:
            return getter(self)
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(f"neither the engine nor {type(module).__name__} has an attribute {name!r}") from None
