"""`DeepSpeedConfig`: a loaded config with its batch sizes resolved, under the attribute names that scripts read."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from deepspeed.config.batch import BatchSizes, batch_of
from deepspeed.config.clean import ConfigProblem
from deepspeed.config.elasticity import elastic_batch
from deepspeed.config.features import IDLE, keys_without_effect, require
from deepspeed.config.load import BY_STRICT, Loaded, load
from deepspeed.config.model import NoEffect
from deepspeed.config.optimizer import OPTIMIZER_TYPES
from deepspeed.config.read import ConfigSource, RawConfig
from deepspeed.config.rules import advice
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import log_dist_once


def _optimizer_name(schema: Schema) -> str | None:
    """The library's own optimizers in lower case, torch classes as they are written."""
    kind = schema.optimizer.type
    known = {name.lower() for name in OPTIMIZER_TYPES}
    return kind.lower() if kind is not None and kind.lower() in known else kind


def _dynamic_scale(schema: Schema) -> dict[str, int | bool] | None:
    """The settings of the dynamic loss scale, or None where the scale is static or off."""
    fp16 = schema.fp16
    if not fp16.enabled or fp16.loss_scale:
        return None
    return {
        "init_scale": 2**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_scale": fp16.min_loss_scale,
    }


def _sparse_attention(schema: Schema) -> dict[str, Any] | None:
    """The mode, and the arguments of its pattern: models build it from these."""
    section = schema.sparse_attention
    return None if section is None else {"mode": section.mode, **section.arguments}


ATTRIBUTES: dict[str, str | Callable[[Schema], Any]] = {
    # precision
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "loss_scale": lambda schema: schema.fp16.loss_scale if schema.fp16.enabled else 1.0,
    "initial_dynamic_scale": lambda schema: 2**schema.fp16.initial_scale_power,
    "dynamic_loss_scale_args": _dynamic_scale,
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    # zero
    "zero_config": "zero_optimization",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_enabled": lambda schema: schema.zero_optimization.stage > 0,
    "zenflow": "zero_optimization.zenflow",
    # optimizer and schedule
    "optimizer_name": _optimizer_name,
    "optimizer_params": lambda schema: dict(schema.optimizer.params or {}) if schema.optimizer.type else None,
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "scheduler_name": "scheduler.type",
    "scheduler_params": lambda schema: None if schema.scheduler.params is None else dict(schema.scheduler.params),
    # sections
    "activation_checkpointing_config": "activation_checkpointing",
    "aio_config": "aio",
    "autotuning_config": "autotuning",
    "checkpoint_config": "checkpoint",
    "comms_config": lambda schema: schema.comms_config,
    "comms_logger_enabled": "comms_logger.enabled",
    "compile_config": "compile",
    "compression_config": "compression_training",
    "data_efficiency_config": "data_efficiency",
    "data_efficiency_enabled": lambda schema: bool(schema.data_efficiency.techniques),
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_params_legacy": "curriculum_learning",
    "eigenvalue_enabled": "eigenvalue.enabled",
    "elasticity_enabled": "elasticity.enabled",
    "expert_parallel_config": "expert_parallel",
    "flops_profiler_config": "flops_profiler",
    "monitor_config": lambda schema: schema.monitor_config,
    "nebula_config": "nebula",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_params": "progressive_layer_drop",
    "sparse_attention": _sparse_attention,
    "sparse_gradients_enabled": "sparse_gradients",
    "tensor_parallel_config": "tensor_parallel",
    "timers_config": "timers",
    "weight_quantization_config": "weight_quantization",
    "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
    # checkpoints
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "checkpoint_tag_validation_enabled": lambda schema: schema.checkpoint.tag_validation.upper() != "IGNORE",
    "checkpoint_tag_validation_fail": lambda schema: schema.checkpoint.tag_validation.upper() == "FAIL",
    "checkpoint_parallel_write_pipeline": "checkpoint.parallel_write.pipeline_stage",
}


class DeepSpeedConfig:
    """The config of one engine, from a source or already loaded.

    `schema` is the validated config, `batch` the resolved batch sizes. Every top-level key is an attribute, and so
    are the older names in `ATTRIBUTES`. A `partial` config may hold "auto" and lack batch sizes.
    """

    def __init__(
        self,
        config: ConfigSource | RawConfig | Loaded,
        mpu: Any = None,
        mesh_device: Any = None,
        *,
        world_size: int | None = None,
        partial: bool = False,
    ) -> None:
        self.loaded: Loaded = config if isinstance(config, Loaded) else load(config, partial=partial)
        self.schema: Schema = self.loaded.schema
        self.mpu = mpu
        self.mesh_device = mesh_device
        require(self.schema)
        self._without_effect = self._idle(IDLE)
        if not partial:
            self._refuse_if_strict(self._without_effect)
        self.world_size = data_parallel_ranks(self.schema, mpu, mesh_device, world_size)
        _check_data_parallel_size(self.schema, self.world_size)
        self.batch: BatchSizes | None = _batch(self.schema, self.world_size, partial, alone=mpu is None)

    @property
    def train_batch_size(self) -> int | None:
        """Samples per optimizer step over all data-parallel ranks."""
        return self.batch.train if self.batch else self.schema.train_batch_size

    @property
    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per rank in one forward and backward."""
        return self.batch.micro if self.batch else self.schema.train_micro_batch_size_per_gpu

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Micro steps per optimizer step."""
        return self.batch.steps if self.batch else self.schema.gradient_accumulation_steps

    @property
    def notes(self) -> list[str]:
        """What a valid config has to be warned of: keys that have no effect, and why."""
        found = [str(note) for note in self._without_effect] + advice(self.schema)
        if self.batch is not None and self.schema.train_batch_size not in (None, self.batch.train):
            found += _counted_tensor_ranks(self.schema, self.batch)
        return found

    def warn(self) -> None:
        """Log the notes, each of them once, by rank 0."""
        for note in self.notes:
            log_dist_once(f"config: {note}", level=logging.WARNING)

    def warn_unused(self, rows: tuple[NoEffect, ...]) -> None:
        """Log which given keys the model has no use for, by rows that it chose; with `strict` that is an error."""
        found = self._idle(rows)
        self._refuse_if_strict(found)
        for note in found:
            log_dist_once(f"config: {note}", level=logging.WARNING)

    def _idle(self, rows: tuple[NoEffect, ...]) -> list[ConfigProblem]:
        return keys_without_effect(self.schema, self.loaded.given, rows)

    def _refuse_if_strict(self, found: list[ConfigProblem]) -> None:
        if found and self.schema.strict:
            raise DeepSpeedConfigError("\n".join(f"{each}{BY_STRICT}" for each in found), path=found[0].path)

    @property
    def _param_dict(self) -> dict[str, Any]:
        return copy.copy(self.loaded.raw)

    def __getattr__(self, name: str) -> Any:
        schema = self.__dict__.get("schema")
        if schema is None or name.startswith("__"):
            raise AttributeError(name)
        found = ATTRIBUTES.get(name)
        if found is not None:
            return found(schema) if callable(found) else attrgetter(found)(schema)
        if name in type(schema).model_fields:
            return getattr(schema, name)
        raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}")


def data_parallel_ranks(schema: Schema, mpu: Any, mesh_device: Any, world_size: int | None) -> int:
    """How many ranks each take a different part of the batch."""
    world = _process_count() if world_size is None else world_size
    if mpu is not None:
        if hasattr(mpu, "get_data_parallel_world_size"):
            return int(mpu.get_data_parallel_world_size())
        return _divide(world, int(mpu.get_sequence_parallel_world_size()), "the mpu's sequence-parallel size")
    if mesh_device is not None:
        return int(mesh_device["data_parallel"].size())
    sizes = schema.axis_sizes
    ranks = _divide(world, sizes["sp"], "sequence_parallel_size")
    return _divide(ranks, sizes["tp"], "tensor_parallel.autotp_size")


def implied_ranks(schema: Schema) -> int:
    """How many data-parallel ranks the config itself speaks of: those that its sizes need, else 1."""
    sizes = (schema.train_micro_batch_size_per_gpu, schema.gradient_accumulation_steps)
    train, part = schema.train_batch_size, math.prod(size or 0 for size in sizes)
    if schema.data_parallel_size is not None:
        return schema.data_parallel_size
    if schema.elasticity.enabled:
        return elastic_batch(schema.elasticity, None).valid[0]
    return train // part if train is not None and part > 0 and train > 0 and train % part == 0 else 1


def _check_data_parallel_size(schema: Schema, ranks: int) -> None:
    expected = schema.data_parallel_size
    if expected is not None and expected != ranks:
        raise DeepSpeedConfigError(
            f"data_parallel_size is {expected}, but {ranks} ranks are data-parallel here. Start another number of "
            "processes, correct it, or leave it out.",
            path="data_parallel_size",
        )


def _divide(world: int, size: int, what: str) -> int:
    if world % size:
        raise DeepSpeedConfigError(
            f"world size {world} is not divisible by {what} {size}. Use a multiple of {size} processes.",
            path=what if "." in what else "sequence_parallel_size",
        )
    return world // size


def _process_count() -> int:
    """The size of the process group if there is one, else 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def _counted_tensor_ranks(schema: Schema, batch: BatchSizes) -> list[str]:
    if schema.elasticity.enabled:
        return []
    return [
        f"train_batch_size: {schema.train_batch_size} counts tensor-parallel ranks as data-parallel ones. The "
        f"{schema.tensor_parallel.autotp_size} ranks that share layers see the same samples, so that a step takes "
        f"{batch.micro} × {batch.steps} × {batch.ranks} data-parallel ranks = {batch.train} samples"
    ]


def _batch(schema: Schema, ranks: int, partial: bool, *, alone: bool = True) -> BatchSizes | None:
    """The batch sizes; numbers that fit together only if tensor-parallel ranks count are those of other programs."""
    sizes = (schema.train_batch_size, schema.train_micro_batch_size_per_gpu)
    if partial and sizes == (None, None) and not schema.elasticity.enabled:
        return None
    tp = schema.axis_sizes["tp"] if alone else 1
    train, micro, steps = (*sizes, schema.gradient_accumulation_steps)
    if tp > 1 and train is not None and micro and steps and train == micro * steps * ranks * tp:
        return BatchSizes(micro * steps * ranks, micro, steps, ranks)
    return batch_of(schema, ranks)
