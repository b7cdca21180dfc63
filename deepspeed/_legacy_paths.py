"""The table of old import paths: where a whole module lives now, or where each of its names does."""

from __future__ import annotations

__all__ = ["MOVED", "SPLIT"]

# old module → the module that it is now, all of it
MOVED: dict[str, str] = {
    "deepspeed.accelerator.abstract_accelerator": "deepspeed.accelerator.interface",
    "deepspeed.accelerator.cpu_accelerator": "deepspeed.accelerator.cpu",
    "deepspeed.accelerator.cuda_accelerator": "deepspeed.accelerator.cuda",
    "deepspeed.accelerator.hpu_accelerator": "deepspeed.accelerator.hpu",
    "deepspeed.accelerator.mlu_accelerator": "deepspeed.accelerator.mlu",
    "deepspeed.accelerator.mps_accelerator": "deepspeed.accelerator.mps",
    "deepspeed.accelerator.npu_accelerator": "deepspeed.accelerator.npu",
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator",
    "deepspeed.accelerator.sdaa_accelerator": "deepspeed.accelerator.sdaa",
    "deepspeed.accelerator.xpu_accelerator": "deepspeed.accelerator.xpu",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.compile.config": "deepspeed.config.compile",
    "deepspeed.runtime.fp16.loss_scaler": "deepspeed.precision.loss_scaler",
    "deepspeed.runtime.pipe.topology": "deepspeed.parallel.topology",
    "deepspeed.runtime.zenflow.zenflow_config": "deepspeed.config.zenflow",
    "deepspeed.runtime.zero.leaf_module_config": "deepspeed.config.leaf_module",
    "deepspeed.runtime.zero.linear": "deepspeed.zero.public.linear",
    "deepspeed.runtime.zero.muon": "deepspeed.ops.muon",
    "deepspeed.runtime.zero.muon.muon_optimizer": "deepspeed.ops.muon",
    "deepspeed.runtime.zero.muon.original_muon": "deepspeed.ops.muon",
    "deepspeed.runtime.zero.offload_config": "deepspeed.config.offload",
    "deepspeed.runtime.zero.tiling": "deepspeed.zero.public.tiling",
    "deepspeed.utils.logging": "deepspeed.log",
    "deepspeed.utils.nvtx": "deepspeed.accelerator.nvtx",
    "deepspeed.utils.torch": "deepspeed.accelerator.torch_version",
    "deepspeed.utils.types": "deepspeed.ops.activation_types",
}

# old module → its names → home of each: "module" if the name is the same there, else "module:name"
SPLIT: dict[str, dict[str, str]] = {
    "deepspeed.monitor.config": {
        "CSVConfig": "deepspeed.config.monitor",
        "CometConfig": "deepspeed.config.monitor",
        "DeepSpeedMonitorConfig": "deepspeed.config.monitor",
        "TensorBoardConfig": "deepspeed.config.monitor",
        "WandbConfig": "deepspeed.config.monitor",
        "get_monitor_config": "deepspeed._legacy_config",
    },
    "deepspeed.runtime.bf16_optimizer": {
        "BF16_Optimizer": "deepspeed.runtime.step.zero_optimizer:ZeroOptimizer",
    },
    "deepspeed.runtime.comm.coalesced_collectives": {
        "reduce_scatter_coalesced": "deepspeed.comm.coalesced",
    },
    "deepspeed.runtime.config": {
        "ADAM_OPTIMIZER": "deepspeed._legacy_config",
        "DeepSpeedConfig": "deepspeed.config",
        "DeepSpeedConfigError": "deepspeed.errors",
        "get_gradient_clipping": "deepspeed._legacy_config",
        "get_log_level": "deepspeed._legacy_config",
    },
    "deepspeed.runtime.config_utils": {
        "DeepSpeedConfigModel": "deepspeed.config.model",
    },
    "deepspeed.runtime.constants": {
        "GRADIENT_CLIPPING_DEFAULT": "deepspeed._legacy_config",
        "LOG_LEVEL_DEFAULT": "deepspeed._legacy_config",
        "ROUTE_EVAL": "deepspeed.runtime.dataloader",
        "ROUTE_PREDICT": "deepspeed.runtime.dataloader",
        "ROUTE_TRAIN": "deepspeed.runtime.dataloader",
    },
    "deepspeed.runtime.fp16.fused_optimizer": {
        "FP16_Optimizer": "deepspeed.runtime.base_optimizer:MixedPrecisionOptimizer",
    },
    "deepspeed.runtime.fp16.unfused_optimizer": {
        "FP16_UnfusedOptimizer": "deepspeed.runtime.base_optimizer:MixedPrecisionOptimizer",
    },
    "deepspeed.runtime.precision_config": {
        "DeepSpeedBF16Config": "deepspeed.config.precision",
        "DeepSpeedFP16Config": "deepspeed.config.precision",
        "get_bfloat16_config": "deepspeed._legacy_config",
    },
    "deepspeed.runtime.tensor_parallel.config": {
        "TPConfig": "deepspeed.config.parallel",
        "TPTrainingConfig": "deepspeed.config.parallel",
        "get_tensor_parallel_config": "deepspeed._legacy_config",
    },
    "deepspeed.runtime.utils": {
        "see_memory_usage": "deepspeed.profiling.memory",
    },
    "deepspeed.runtime.zero": {
        "GatheredParameters": "deepspeed.zero.public.gathered",
        "Init": "deepspeed.zero.birth.init",
        "ZeroParamStatus": "deepspeed.zero.parameters.shard",
        "ZeroParamType": "deepspeed.zero.parameters.shard",
        "register_external_parameter": "deepspeed.zero.parameters.external",
        "unregister_external_parameter": "deepspeed.zero.parameters.external",
        "unwrap_model_for_generation": "deepspeed.zero.public.generation",
    },
    "deepspeed.runtime.zero.config": {
        "DeepSpeedZeroConfig": "deepspeed.config.zero",
        "DeepSpeedZeroOffloadOptimizerConfig": "deepspeed.config.offload",
        "DeepSpeedZeroOffloadParamConfig": "deepspeed.config.offload",
        "ZeroStageEnum": "deepspeed.config.zero",
    },
    "deepspeed.runtime.zero.parameter_offload": {
        "DeepSpeedZeRoOffload": "deepspeed.zero.public.rehook:ParameterOffload",
        "ZeROOrderedDict": "deepspeed.zero.parameters.external:WatchedParameters",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "DeepSpeedTensorOverride": "deepspeed.zero.birth.init",
        "GatheredParameters": "deepspeed.zero.public.gathered",
        "Init": "deepspeed.zero.birth.init",
        "ZeroParamStatus": "deepspeed.zero.parameters.shard",
        "ZeroParamType": "deepspeed.zero.parameters.shard",
        "partitioned_param_data_shape": "deepspeed.zero.public.views",
        "register_external_parameter": "deepspeed.zero.parameters.external",
        "unregister_external_parameter": "deepspeed.zero.parameters.external",
        "zero3_linear_wrap": "deepspeed.zero.public.linear",
    },
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": "deepspeed.runtime.step.zero_optimizer:ZeroOptimizer",
        "estimate_zero3_model_states_mem_needs": "deepspeed.memory",
        "estimate_zero3_model_states_mem_needs_all_cold": "deepspeed.memory",
        "estimate_zero3_model_states_mem_needs_all_live": "deepspeed.memory",
        "unwrap_model_for_generation": "deepspeed.zero.public.generation",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": "deepspeed.runtime.step.zero_optimizer:ZeroOptimizer",
        "estimate_zero1_model_states_mem_needs": "deepspeed.memory",
        "estimate_zero1_model_states_mem_needs_all_cold": "deepspeed.memory",
        "estimate_zero1_model_states_mem_needs_all_live": "deepspeed.memory",
        "estimate_zero2_model_states_mem_needs": "deepspeed.memory",
        "estimate_zero2_model_states_mem_needs_all_cold": "deepspeed.memory",
        "estimate_zero2_model_states_mem_needs_all_live": "deepspeed.memory",
    },
    "deepspeed.runtime.zero.utils": {
        "ZeRORuntimeException": "deepspeed.errors:CheckpointError",
    },
    "deepspeed.utils.comms_logging": {
        "CommsLogger": "deepspeed.comm.logger",
        "calc_bw_log": "deepspeed.comm.statistics",
        "convert_size": "deepspeed.comm.statistics",
        "get_caller_func": "deepspeed.comm.statistics",
        "print_rank_0": "deepspeed.comm.logger",
    },
    "deepspeed.utils.numa": {
        "parse_range_list": "deepspeed.launcher.binding",
    },
    "deepspeed.utils.timer": {
        "CudaEventTimer": "deepspeed.accelerator.clock",
        "NoopTimer": "deepspeed.profiling.timers",
        "SynchronizedWallClockTimer": "deepspeed.profiling.timers",
        "ThroughputTimer": "deepspeed.profiling.throughput",
        "trim_mean": "deepspeed.profiling.timers",
    },
}
