"""The engine's methods that save and load: checkpoints, the model's state dict, the model in one file."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.training_state import Counters
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.checkpoint.storage.manager import default_tag
from deepspeed.config.features import plugins
from deepspeed.config.memory import read_size
from deepspeed.config.schema import CHECKPOINT_ENGINES
from deepspeed.config.zero import OffloadStateTypeEnum as Kind
from deepspeed.errors import CheckpointError, DeepSpeedConfigError, DeepSpeedError, UsageError
from deepspeed.events import RunContinued
from deepspeed.log import NOTICE, log_dist, logger
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine, TorchCheckpointEngine
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.saving.checkpoints import Checkpoints, leftovers, plain_copy
from deepspeed.runtime.saving.model_state import (
    WeightBuckets,
    collect,
    gather_experts,
    join_slices,
    load,
    load_by,
    write_model,
)
from deepspeed.runtime.saving.restoring import LoadRequest, rates, warn_of_rates
from deepspeed.runtime.saving.training_state import RunState, continue_scale
from deepspeed.tensor_parallel import cut_state
from deepspeed.zero.interface import shards_of

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

    def _plug_in(self) -> None:
        """Take the checkpoint engine that a section of the config asks for, and an installed package brings."""
        found = plugins(self._parts.config.schema, CHECKPOINT_ENGINES)
        if len(found) > 1:
            keys = " and ".join(key for key, _ in found)
            raise DeepSpeedConfigError(f"{keys} ask for a checkpoint engine each; remove one", path=found[0][0])
        for key, point in found:
            made = point.load()(self._parts.config._param_dict, self._parts.layout.world.rank)
            if not isinstance(made, CheckpointEngine):
                raise DeepSpeedConfigError(
                    f"{key}: the entry point {point.value!r} of {CHECKPOINT_ENGINES} gave a {type(made).__name__}; "
                    "expected a deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine",
                    path=key,
                )
            self.checkpoint_engine = made

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
        if self._parts.backward.has_gradients and accumulation.position:
            log_dist(
                f"save_checkpoint was called {accumulation.position} micro steps after the "
                "last optimizer step: gradients are not part of a checkpoint, so a resumed run does not have those",
                level=WARNING,
            )
        counters = Counters(self.global_steps, self.global_samples, self.skipped_steps, accumulation.micro_steps)
        run = RunState(
            counters, self.lr_scheduler, self.training_dataloader, {} if client_state is None else client_state
        )
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
        whole = load_optimizer_states and not load_module_only
        exact = whole and self._parts.config.schema.zero_optimization.load_from_fp32_weights
        wish = LoadRequest(load_module_strict, "master" if exact else "param", whole, custom_load_fn)
        load = partial(self._load_files, wish=wish, run=not load_module_only, schedule=load_lr_scheduler_states)
        plug = self._checkpoints.plug
        found = load(load_dir, name) if plug is None else self._load_plugged(plug, load_dir, name, load)
        if found is None:
            return None, None
        path, file, client = found
        if comm.get_rank() == 0 and logger.isEnabledFor(NOTICE):
            size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            seconds = time.perf_counter() - began
            log_dist(
                f"checkpoint {path.name!r} was loaded from {path}: {gibibytes(size)} in {seconds:.1f} s", level=NOTICE
            )
        return os.path.join(path, file), client

    def _load_files(
        self, load_dir: str | os.PathLike[str], tag: str | None, *, wish: LoadRequest, run: bool, schedule: bool
    ) -> _Loaded | None:
        """The folder that was loaded, its first file, and the client's state."""
        path = self._checkpoints.find(load_dir, tag)
        if path is None:
            return None
        if not path.is_dir():
            raise UsageError(f"{path} is no directory")
        before = rates(self._parts.basic_optimizer)
        source = self._checkpoints.load(path, wish)
        scheduled = run and schedule and self._continue_schedule(source)
        if run:
            self._continue_run(source, wish.optimizer)
        self._checkpoints.loaded()
        if wish.optimizer and not scheduled:
            warn_of_rates(self._parts.basic_optimizer, before)
        client = {**leftovers(source, scheduler_loaded=scheduled), **source.small.client_state}
        return path, source.files[0], client

    def _load_plugged(
        self, plug: CheckpointEngine, load_dir: str | os.PathLike[str], tag: str | None, load: Callable[..., Any]
    ) -> _Loaded | None:
        """The same from a copy that the plugged engine's files are read into."""
        with plain_copy(plug, self._checkpoints.manager.exchange, load_dir, tag) as copy:
            if copy is None:
                log_dist(f"{load_dir} has no file 'latest', so nothing was loaded; pass the tag", level=WARNING)
                return None
            found = load(*copy)
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
        if self._parts.pacing is not None:
            self._parts.pacing.went_to(self.global_steps)
        if self._parts.events.wants(RunContinued):
            self._parts.events.emit(RunContinued(self.global_steps))

    # ---- the model as a whole

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict; of a model in shards host copies of the whole, on every rank.

        Where one rank is enough, `zero3_consolidated_16bit_state_dict` needs the memory once. With `keep_vars` the
        parameters themselves, which are empty where they are sharded.
        """
        module = self._parts.module
        experts = self._parts.experts
        sliced = experts is not None and bool(experts.slices)
        shared = self._parts.layout.tensor.size > 1 or sliced
        if not keep_vars and (shared or (self._parts.reducer.replicated is None and shards_of(module.parameters()))):
            whole = collect(module, exclude_frozen=exclude_frozen_parameters)
            assert whole is not None, "this rank keeps it"
            if experts is not None:
                join_slices(whole, experts)
            found: dict[str, Any] = OrderedDict() if destination is None else destination
            found.update({prefix + name: value for name, value in whole.items()})
            return found
        into: dict[str, Any] = {} if destination is None else {"destination": destination}
        found = module.state_dict(**into, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    found.pop(prefix + name, None)
        return found

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Collection[nn.Parameter] | None = None,
        allowed_missing_keys: Collection[str] | None = None,
    ) -> None:
        """Load whole values, given directly or under "module"; the masters of the optimizer follow.

        Of a model in shards every rank takes its part of its own `checkpoint`; with `fetch_z3_params` rank 0's values
        are given to all, and other ranks need none. `custom_load_fn(src=, dst=)` replaces the loading itself.
        """
        inner = checkpoint.get("module")
        state = inner if isinstance(inner, Mapping) else checkpoint
        module = self._parts.module
        if self._parts.layout.tensor.size > 1:
            if fetch_z3_params:
                raise UsageError(
                    "load_module_state_dict(fetch_z3_params=True) gives rank 0's values to all, but tensor-parallel "
                    "ranks hold different parts. Give every rank the whole state dict and leave the argument out"
                )
            state = cut_state(module, state, self._parts.layout.tensor.rank)
        experts = self._parts.experts
        if experts is not None and experts.slices:
            if fetch_z3_params:
                raise UsageError(
                    "load_module_state_dict(fetch_z3_params=True) gives rank 0's values to all, but ranks hold "
                    "different experts. Give every rank the whole state dict and leave the argument out"
                )
            state = experts.cut(state)
        if custom_load_fn is not None:
            load_by(module, state, custom_load_fn)
        else:
            load(
                module,
                state,
                strict=strict,
                from_first=fetch_z3_params,
                only=z3_params_to_fetch,
                allowed_missing=allowed_missing_keys or (),
            )
        if self._parts.states is not None:
            self._parts.states.adopt_edits()

    def zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model in its own dtype, in host memory of rank 0; None on other ranks.

        Names are the model's, a tied parameter has all of its names, persistent buffers are included.
        """
        keep = comm.get_rank() == 0
        experts = self._parts.experts
        if experts is None:
            return collect(self._parts.module, keep=keep, exclude_frozen=exclude_frozen_parameters)
        found = collect(self._parts.module, exclude_frozen=exclude_frozen_parameters)
        assert found is not None, "every rank keeps its experts"
        gather_experts(found, experts, keep=keep)
        return found if keep else None

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self.zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self.zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def stream_weights(
        self, bucket: int | str = "512MB", *, dtype: torch.dtype | None = None, merge_lora: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """Whole tensors by Transformers' names, in buckets of at most so many bytes, or of one larger tensor.

        All ranks iterate together, to the end. Adapters are added to their weights, or come by names of their own. A
        bucket that is let go before the next one bounds the memory at two of them.
        """
        return iter(WeightBuckets(self._parts, read_size(bucket), dtype, merge=merge_lora))

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Rank 0 writes the whole model in its own dtype; a name that ends in .safetensors gives that format.

        With `max_shard_size`, such as "5GB", it is several files with an index as Transformers reads them. At stage 3
        it is an error where the config says `stage3_gather_16bit_weights_on_model_save` false.
        """
        zero = self._parts.config.schema.zero_optimization
        given = "gather_16bit_weights_on_model_save" in zero.model_fields_set
        if zero.shards_parameters and not zero.gather_16bit_weights_on_model_save and given:
            raise DeepSpeedConfigError(
                "save_16bit_model() gathers the whole model on rank 0, which the config forbids by "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save false. Remove the key or set it to true, "
                "or call save_checkpoint(), whose files zero_to_fp32.py joins",
                path="zero_optimization.stage3_gather_16bit_weights_on_model_save",
            )
        state = self.zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        trouble: list[Any] = [None]
        if state is not None:
            try:
                write_model(state, Path(save_dir), save_filename, max_shard_size)
            except (DeepSpeedError, OSError) as error:
                trouble = [str(error)]
        comm.broadcast_object_list(trouble, src=0)
        if trouble[0] is not None:
            raise CheckpointError(f"save_16bit_model failed on rank 0: {trouble[0]}")
        return True

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """The old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def empty_partition_cache(self) -> None:
        """Free whole parameters that are not in use at the moment, on all ranks together.

        Those that stay whole between uses (`stage3_param_persistence_threshold`), too: they return before the next use.
        """
        sharded = self._parts.sharded
        if sharded.hooks is not None and Kind.lp_params not in self._parts.moved:
            sharded.hooks.let_go()
