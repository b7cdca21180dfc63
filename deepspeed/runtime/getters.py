"""The read-only config accessors and rank facts of the engine, from two tables. Nothing inside reads these."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from deepspeed import comm
from deepspeed.data.random_ltd import join_layers
from deepspeed.zero import interface as zero

# the names of keys, which are those of methods
_OF_CONFIG = """
    aio_config bf16_master_weights_and_gradients checkpoint_tag_validation_enabled checkpoint_tag_validation_fail
    curriculum_enabled_legacy curriculum_params_legacy data_efficiency_config data_efficiency_enabled
    dynamic_loss_scale_args fp16_auto_cast fp16_master_weights_and_gradients initial_dynamic_scale
    load_universal_checkpoint optimizer_legacy_fusion optimizer_name optimizer_params pld_enabled pld_params
    scheduler_name scheduler_params sparse_gradients_enabled tensor_parallel_config torch_autocast_dtype
    torch_autocast_enabled torch_autocast_lower_precision_safe_modules use_node_local_storage
    zero_optimization_stage
"""
_OF_SCHEMA = """
    dataloader_drop_last dump_state gradient_clipping gradient_predivide_factor log_level
    managed_gradient_accumulation memory_breakdown steps_per_print zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer
"""
_OF_FLOPS_PROFILER = """
    detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules
"""
_OF_AUTOTUNING = "enabled end_profile_step metric metric_path model_info_path start_profile_step"
_OF_ZERO = """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients
    elastic_checkpoint gather_16bit_weights_on_model_save ignore_unused_parameters legacy_stage1
    load_from_fp32_weights log_trace_cache_warnings max_live_parameters max_reuse_distance
    model_persistence_threshold module_granularity_threshold offload_optimizer offload_param
    param_persistence_threshold parameter_alignment prefetch_bucket_size reduce_bucket_size reduce_scatter
    round_robin_gradients save_muon_momentum_buffer_in_memory sub_group_size
"""
_NAMED_SO_IN_ZERO = """
    mics_shard_size zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights
    zero_quantized_weights zeropp_loco_param
"""

# method → path below the engine's DeepSpeedConfig; `engine.method()` returns the value
GETTERS: dict[str, str] = {
    **{name: name for name in _OF_CONFIG.split()},
    **{name: f"schema.{name}" for name in _OF_SCHEMA.split()},
    **{f"flops_profiler_{name}": f"schema.flops_profiler.{name}" for name in _OF_FLOPS_PROFILER.split()},
    **{f"zero_{name}": f"schema.zero_optimization.{name}" for name in _OF_ZERO.split()},
    **{name: f"schema.zero_optimization.{name}" for name in _NAMED_SO_IN_ZERO.split()},
    **{f"autotuning_{name}": f"schema.autotuning.{name}" for name in _OF_AUTOTUNING.split()},
    "autotp_size": "schema.tensor_parallel.autotp_size",
    "bf16_optimizer_states": "schema.bf16.bf16_optimizer_states",
    "bfloat16_enabled": "schema.bf16.enabled",
    "checkpoint_serialization_enabled": "schema.checkpoint.checkpoint_serialization",
    "curriculum_learning_config": "schema.data_efficiency.data_sampling.curriculum_learning",
    "data_sampling_config": "schema.data_efficiency.data_sampling",
    "pld_gamma": "schema.progressive_layer_drop.gamma",
    "pld_theta": "schema.progressive_layer_drop.theta",
    "random_ltd_config": "schema.data_efficiency.data_routing.random_ltd",
    "fp16_enabled": "schema.fp16.enabled",
    "zenflow_config": "schema.zero_optimization.zenflow",
    "zero_multi_rank_bucket_allreduce": "schema.zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_overlap_comm": "schema.zero_optimization.overlaps_comm",
    "is_sanity_checks_enabled": "schema.zero_optimization.enable_sanity_checks",
}

# methods whose value follows from others
_DERIVED: dict[str, Callable[[Any], Any]] = {
    "autotuning_profile_model_info": lambda engine: (
        engine._config.schema.autotuning.enabled and engine._config.schema.autotuning.model_info.profile
    ),
    "checkpoint_writer_enabled": lambda engine: engine._config.schema.checkpoint.writer is not None,
    "curriculum_learning_enabled": lambda engine: engine._config.schema.data_efficiency.curriculum is not None,
    "data_sampling_enabled": lambda engine: bool(engine._config.schema.data_efficiency.sampling),
    "get_pld_theta": lambda engine: getattr(_paced(engine, "layer_drop"), "current_theta", None),
    "random_ltd_initialize": lambda engine: _join_again(engine),
    "random_ltd_enabled": lambda engine: engine._config.schema.data_efficiency.random_ltd is not None,
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


def _join_again(engine: Any) -> None:
    """Join layers that were converted after `initialize`."""
    routing, pacing = engine._config.schema.data_efficiency.random_ltd, engine._parts.pacing
    if routing is not None and pacing is not None:
        kind = engine._parts.kind
        here = None if kind.whole else [number for number, _ in kind.blocks().here]
        pacing.tokens = join_layers(engine.module, routing, engine.train_batch_size(), here)


def _paced(engine: Any, name: str) -> Any:
    return getattr(engine._parts.pacing, name, None)


# plain attributes
FACTS: dict[str, Callable[[Any], Any]] = {
    "_support_torch_style_backward": lambda engine: True,
    "curriculum_scheduler_legacy": lambda engine: _paced(engine, "curriculum"),
    "progressive_layer_drop": lambda engine: _paced(engine, "layer_drop"),
    "random_ltd_scheduler": lambda engine: _paced(engine, "tokens"),
    "communication_data_type": lambda engine: engine._parts.precision.reduce,
    "data_parallel_group": lambda engine: engine._parts.layout.data.group,
    "enable_backward_allreduce": lambda engine: not engine._parts.backward.suspended,
    "flops_profiler": lambda engine: engine._parts.flops_profiler,
    "global_rank": lambda engine: comm.get_rank(),
    "memory_profiler": lambda engine: engine._parts.memory_profiler,
    "has_moe_layers": lambda engine: engine._parts.experts is not None,
    "mp_world_size": lambda engine: engine._parts.layout.model.size,
    "num_experts": lambda engine: [layer.experts for layer in getattr(engine._parts.experts, "layers", ())],
    "save_non_zero_checkpoint": lambda engine: engine._parts.layout.samples.rank == 0,
    "save_zero_checkpoint": lambda engine: engine._config.schema.zero_optimization.shards_states,
    "scale_wrt_gas": lambda engine: True,
    "seq_dp_world_size": lambda engine: engine._parts.layout.samples.size,
    "sequence_parallel_size": lambda engine: engine._parts.layout.sequence.size,
    "sparse_all_gather": lambda engine: zero.sparse_all_gather,
    "sparse_allreduce": lambda engine: zero.sparse_allreduce,
    "sparse_allreduce_bucket": lambda engine: zero.sparse_allreduce_bucket,
    "sparse_allreduce_no_retain": lambda engine: zero.sparse_allreduce_no_retain,
    "world_size": lambda engine: comm.get_world_size(),
}


def find(name: str) -> Callable[[Any], Any] | None:
    """How to get the method `name` of an engine; None if it is in no table."""
    path = GETTERS.get(name)
    if path is not None:
        return lambda engine: lambda: attrgetter(path)(engine._config)
    derived = _DERIVED.get(name)
    if derived is not None:
        return lambda engine: lambda: derived(engine)
    return None
