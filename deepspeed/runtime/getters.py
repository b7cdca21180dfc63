"""The read-only config accessors and rank facts of the engine, from two tables. Nothing inside reads these."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from deepspeed import comm

_ZERO = "schema.zero_optimization."

# method → path below the engine's DeepSpeedConfig; `engine.method()` returns the value
GETTERS: dict[str, str] = {
    "autotp_size": "schema.tensor_parallel.autotp_size",
    "autotuning_enabled": "schema.autotuning.enabled",
    "aio_config": "schema.aio",
    "bf16_master_weights_and_gradients": "schema.bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "schema.bf16.bf16_optimizer_states",
    "bfloat16_enabled": "schema.bf16.enabled",
    "checkpoint_serialization_enabled": "schema.checkpoint.checkpoint_serialization",
    "checkpoint_tag_validation_enabled": "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail": "checkpoint_tag_validation_fail",
    "data_efficiency_config": "schema.data_efficiency",
    "data_efficiency_enabled": "schema.data_efficiency.enabled",
    "dataloader_drop_last": "schema.dataloader_drop_last",
    "dump_state": "schema.dump_state",
    "dynamic_loss_scale_args": "dynamic_loss_scale_args",
    "flops_profiler_detailed": "schema.flops_profiler.detailed",
    "flops_profiler_enabled": "schema.flops_profiler.enabled",
    "flops_profiler_module_depth": "schema.flops_profiler.module_depth",
    "flops_profiler_output_file": "schema.flops_profiler.output_file",
    "flops_profiler_profile_step": "schema.flops_profiler.profile_step",
    "flops_profiler_recompute_fwd_factor": "schema.flops_profiler.recompute_fwd_factor",
    "flops_profiler_top_modules": "schema.flops_profiler.top_modules",
    "fp16_auto_cast": "schema.fp16.auto_cast",
    "fp16_enabled": "schema.fp16.enabled",
    "fp16_master_weights_and_gradients": "schema.fp16.fp16_master_weights_and_grads",
    "gradient_clipping": "schema.gradient_clipping",
    "gradient_predivide_factor": "schema.gradient_predivide_factor",
    "initial_dynamic_scale": "initial_dynamic_scale",
    "load_universal_checkpoint": "schema.checkpoint.load_universal",
    "log_level": "schema.log_level",
    "managed_gradient_accumulation": "schema.managed_gradient_accumulation",
    "memory_breakdown": "schema.memory_breakdown",
    "optimizer_legacy_fusion": "schema.optimizer.legacy_fusion",
    "optimizer_name": "optimizer_name",
    "optimizer_params": "optimizer_params",
    "scheduler_name": "scheduler_name",
    "scheduler_params": "scheduler_params",
    "steps_per_print": "schema.steps_per_print",
    "tensor_parallel_config": "schema.tensor_parallel",
    "torch_autocast_enabled": "schema.torch_autocast.enabled",
    "torch_autocast_dtype": "schema.torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "schema.torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "schema.checkpoint.use_node_local_storage",
    "zenflow_config": _ZERO + "zenflow",
    "zero_allgather_bucket_size": _ZERO + "allgather_bucket_size",
    "zero_allgather_partitions": _ZERO + "allgather_partitions",
    "zero_allgather_sequential": _ZERO + "allgather_sequential",
    "zero_allow_untested_optimizer": "schema.zero_allow_untested_optimizer",
    "zero_compute_grad_norm": _ZERO + "compute_grad_norm",
    "zero_contiguous_gradients": _ZERO + "contiguous_gradients",
    "zero_elastic_checkpoint": _ZERO + "elastic_checkpoint",
    "zero_force_ds_cpu_optimizer": "schema.zero_force_ds_cpu_optimizer",
    "zero_gather_16bit_weights_on_model_save": _ZERO + "gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size": _ZERO + "zero_hpz_partition_size",
    "zero_ignore_unused_parameters": _ZERO + "ignore_unused_parameters",
    "zero_legacy_stage1": _ZERO + "legacy_stage1",
    "zero_load_from_fp32_weights": _ZERO + "load_from_fp32_weights",
    "zero_log_trace_cache_warnings": _ZERO + "log_trace_cache_warnings",
    "zero_max_live_parameters": _ZERO + "max_live_parameters",
    "zero_max_reuse_distance": _ZERO + "max_reuse_distance",
    "zero_model_persistence_threshold": _ZERO + "model_persistence_threshold",
    "zero_module_granularity_threshold": _ZERO + "module_granularity_threshold",
    "zero_multi_rank_bucket_allreduce": _ZERO + "use_multi_rank_bucket_allreduce",
    "zero_offload_optimizer": _ZERO + "offload_optimizer",
    "zero_offload_param": _ZERO + "offload_param",
    "zero_optimization_stage": _ZERO + "stage",
    "zero_overlap_comm": _ZERO + "overlaps_comm",
    "zero_param_persistence_threshold": _ZERO + "param_persistence_threshold",
    "zero_parameter_alignment": _ZERO + "parameter_alignment",
    "zero_prefetch_bucket_size": _ZERO + "prefetch_bucket_size",
    "zero_quantized_gradients": _ZERO + "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": _ZERO + "zero_quantized_nontrainable_weights",
    "zero_quantized_weights": _ZERO + "zero_quantized_weights",
    "zero_reduce_bucket_size": _ZERO + "reduce_bucket_size",
    "zero_reduce_scatter": _ZERO + "reduce_scatter",
    "zero_round_robin_gradients": _ZERO + "round_robin_gradients",
    "zero_save_muon_momentum_buffer_in_memory": _ZERO + "save_muon_momentum_buffer_in_memory",
    "zero_sub_group_size": _ZERO + "sub_group_size",
    "is_sanity_checks_enabled": _ZERO + "enable_sanity_checks",
}

# methods whose value follows from others
_DERIVED: dict[str, Callable[[Any], Any]] = {
    "checkpoint_writer_enabled": lambda engine: engine._config.schema.checkpoint.writer is not None,
    "dynamic_loss_scale": lambda engine: engine._parts.scale.dynamic,
    "get_data_parallel_rank": lambda engine: engine._parts.layout.data.rank,
    "get_data_types": lambda engine: (engine._parts.precision.param, engine._parts.precision.accumulate),
    "get_model_parallel_rank": lambda engine: engine._parts.layout.model.rank,
    "get_sequence_parallel_group": lambda engine: engine._parts.layout.sequence.group,
    "get_wall_clock_timers": lambda engine: engine.timers.get_timers(),
    "get_tensor_parallel_rank": lambda engine: engine._parts.layout.tensor.rank,
    "wall_clock_breakdown": lambda engine: bool(
        engine._config.schema.wall_clock_breakdown or engine._config.schema.flops_profiler.enabled
    ),
    "postscale_gradients": lambda engine: not engine._config.schema.prescale_gradients,
    "zero_cpu_offload": lambda engine: engine._config.schema.zero_optimization.offloads_optimizer,
    "zero_optimization": lambda engine: engine._config.schema.zero_optimization.shards_states,
    "zero_optimization_partition_gradients": lambda engine: engine._config.schema.zero_optimization.shards_gradients,
    "zero_optimization_partition_weights": lambda engine: engine._config.schema.zero_optimization.shards_parameters,
}

# plain attributes
FACTS: dict[str, Callable[[Any], Any]] = {
    "communication_data_type": lambda engine: engine._parts.precision.reduce,
    "data_parallel_group": lambda engine: engine._parts.layout.data.group,
    "enable_backward_allreduce": lambda engine: not engine._parts.backward.suspended,
    "flops_profiler": lambda engine: engine._parts.flops_profiler,
    "global_rank": lambda engine: comm.get_rank(),
    "memory_profiler": lambda engine: engine._parts.memory_profiler,
    "has_moe_layers": lambda engine: engine._parts.experts is not None,
    "mp_world_size": lambda engine: engine._parts.layout.model.size,
    "num_experts": lambda engine: [layer.experts for layer in getattr(engine._parts.experts, "layers", ())],
    "seq_dp_world_size": lambda engine: engine._parts.layout.samples.size,
    "sequence_parallel_size": lambda engine: engine._parts.layout.sequence.size,
    "world_size": lambda engine: comm.get_world_size(),
}


def find(name: str) -> Callable[[Any], Any] | None:
    """How to get the attribute `name` of an engine; None if it is in no table."""
    if name in FACTS:
        return FACTS[name]
    path = GETTERS.get(name)
    if path is not None:
        return lambda engine: lambda: attrgetter(path)(engine._config)
    derived = _DERIVED.get(name)
    if derived is not None:
        return lambda engine: lambda: derived(engine)
    return None
