"""Older attribute names of `DeepSpeedConfig` → where the value lives in the schema. Nothing inside reads these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.config.optimizer import OPTIMIZER_TYPES
from deepspeed.config.schema import Schema

__all__ = ["ATTRIBUTES"]


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
    "data_efficiency_enabled": "data_efficiency.enabled",
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
