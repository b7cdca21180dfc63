"""The engine's `save_checkpoint` and `load_checkpoint`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from deepspeed import comm
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.training_state import Counters
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.checkpoint.storage.manager import default_tag
from deepspeed.errors import UsageError
from deepspeed.events import RunContinued
from deepspeed.log import log_dist, logger
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.saving.checkpoints import Checkpoints, leftovers
from deepspeed.runtime.saving.optimizer_match import rates, tell_of_rates
from deepspeed.runtime.saving.plugged import plain_copy
from deepspeed.runtime.saving.restoring import Wish
from deepspeed.runtime.saving.training_state import Run
from deepspeed.runtime.step.scale_names import continue_scale

__all__ = ["CheckpointMethods"]

_Loaded = tuple[Path, str, dict[str, Any]]


class CheckpointMethods:
    """Mixed into the engine; all ranks call these together."""

    _parts: Parts
    _checkpoints: Checkpoints
    lr_scheduler: Any
    training_dataloader: Any
    global_steps: int
    global_samples: int
    skipped_steps: int

    @property
    def checkpoint_engine(self) -> CheckpointEngine:
        """What writes and reads the files of checkpoints; set one of your own before saving or loading, on all ranks.

        It is cleaned up with the engine.
        """
        return self._checkpoints.plug or TorchCheckpointEngine()

    @checkpoint_engine.setter
    def checkpoint_engine(self, engine: CheckpointEngine) -> None:
        if not isinstance(engine, CheckpointEngine):
            raise UsageError(f"engine.checkpoint_engine takes a CheckpointEngine; found {type(engine).__name__}")
        plugged = type(engine) is not TorchCheckpointEngine
        if plugged and self._parts.config.schema.checkpoint.use_node_local_storage:
            raise UsageError(
                "checkpoint.use_node_local_storage is on, and every rank must see the files of a checkpoint engine of "
                "your own: turn the key off, or leave engine.checkpoint_engine as it is"
            )
        self._checkpoints.plug = engine if plugged else None
        if plugged:
            self._parts.resources.callback(engine.cleanup)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that training needs to go on to `save_dir/tag`; every rank calls this.

        `client_state` is the caller's own: see docs/checkpoints.md for what it may hold. With
        `checkpoint.writer.decoupled` the call returns once everything is copied, and an error of the writing is
        raised by the next save, load or `destroy`.
        """
        accumulation = self._parts.accumulation
        if self._parts.backward.has_gradients and accumulation.micro_steps % accumulation.steps:
            log_dist(
                f"save_checkpoint was called {accumulation.micro_steps % accumulation.steps} micro steps after the "
                "last optimizer step: gradients are not part of a checkpoint, so a resumed run does not have those",
                level=WARNING,
            )
        counters = Counters(self.global_steps, self.global_samples, self.skipped_steps, accumulation.micro_steps)
        run = Run(counters, self.lr_scheduler, self.training_dataloader, {} if client_state is None else client_state)
        name = default_tag(self.global_steps) if tag is None else str(tag)
        self._checkpoints.save(save_dir, name, run, latest=save_latest, exclude_frozen=bool(exclude_frozen_parameters))
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, whoever wrote it, on however many ranks and at whatever stage.

        Returns the path and the state that the caller gave to `save_checkpoint`, together with what DeepSpeed adds to
        it; (None, None) if no tag is given and `load_dir` names no checkpoint. `load_module_only` leaves counters,
        schedule and optimizer alone. `custom_load_fn(src=state dict, dst=module)` puts the weights into the model.
        """
        began = time.perf_counter()
        name = None if tag is None else str(tag)
        rest = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
        if self._checkpoints.plug is not None:
            found = self._load_plugged(self._checkpoints.plug, load_dir, name, *rest)
        else:
            found = self._load_files(load_dir, name, *rest)
        if found is None:
            return None, None
        path, file, client = found
        if comm.get_rank() == 0 and logger.isEnabledFor(INFO):
            size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            seconds = time.perf_counter() - began
            log_dist(f"checkpoint {path.name!r} was loaded from {path}: {gibibytes(size)} in {seconds:.1f} s")
        return os.path.join(path, file), client

    def _load_files(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None,
        load_module_strict: bool,
        load_optimizer_states: bool,
        load_lr_scheduler_states: bool,
        load_module_only: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> _Loaded | None:
        """The folder that was loaded, its first file, and the client's state."""
        path = self._checkpoints.find(load_dir, tag)
        if path is None:
            return None
        if not path.is_dir():
            raise UsageError(f"{path} is no directory")
        whole = load_optimizer_states and not load_module_only
        exact = whole and self._parts.config.schema.zero_optimization.load_from_fp32_weights
        before = rates(self._parts.basic_optimizer)
        source = self._checkpoints.load(
            path,
            Wish(
                strict=load_module_strict,
                weights="master" if exact else "param",
                optimizer=whole,
                load_fn=custom_load_fn,
            ),
        )
        scheduled = False
        if not load_module_only:
            scheduled = load_lr_scheduler_states and self._continue_schedule(source)
            self._continue_run(source, whole)
        self._checkpoints.loaded()
        if whole and not scheduled:
            tell_of_rates(self._parts.basic_optimizer, before)
        client = {**leftovers(source, scheduler_loaded=scheduled), **source.small.client_state}
        return path, source.files[0], client

    def _load_plugged(
        self, plug: CheckpointEngine, load_dir: str | os.PathLike[str], tag: str | None, *options: Any
    ) -> _Loaded | None:
        """The same from a copy that the plugged engine's files are read into."""
        with plain_copy(plug, self._checkpoints.manager.exchange, load_dir, tag) as copy:
            if copy is None:
                log_dist(f"{load_dir} has no file 'latest', so nothing was loaded; pass the tag", level=WARNING)
                return None
            found = self._load_files(*copy, *options)
        return None if found is None else (Path(load_dir, copy[1]), *found[1:])

    def _continue_schedule(self, source: Source) -> bool:
        load = getattr(self.lr_scheduler, "load_state_dict", None)
        state = source.small.lr_scheduler
        if load is None:
            return False
        if state is None:
            log_dist(
                "the checkpoint holds no state of a learning-rate schedule; the schedule stays as it is", level=WARNING
            )
            return False
        load(state)
        return True

    def _continue_run(self, source: Source, whole: bool) -> None:
        """Counters; with the optimizer also loss scale, random states and the place in the data."""
        counters, accumulation = source.small.counters, self._parts.accumulation
        self.global_steps = counters.global_steps
        self.skipped_steps = counters.skipped_steps
        batch = self._parts.config.batch
        self.global_samples = counters.global_samples or counters.global_steps * (batch.train if batch else 0)
        micro = counters.micro_steps or counters.global_steps * accumulation.steps
        accumulation.micro_steps = micro - micro % accumulation.steps  # gradients are not part of a checkpoint
        if whole:
            continue_scale(self._parts.scale, source.small.loss_scale)
            self._checkpoints.restore_rank(source, self.training_dataloader)
        if self._parts.events.wants(RunContinued):
            self._parts.events.emit(RunContinued(self.global_steps))
