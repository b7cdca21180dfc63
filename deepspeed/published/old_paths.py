"""Tables of import paths: where modules and names live now, and what takes the place of what is gone or to come."""

from __future__ import annotations

# old module → the module that it is now, all of it
MOVED: dict[str, str] = {
    "deepspeed.accelerator.abstract_accelerator": "deepspeed.accelerator.interface",
    "deepspeed.accelerator.cpu_accelerator": "deepspeed.accelerator.cpu",
    "deepspeed.accelerator.cuda_accelerator": "deepspeed.accelerator.cuda",
    "deepspeed.accelerator.hpu_accelerator": "deepspeed.accelerator.vendors",
    "deepspeed.accelerator.mlu_accelerator": "deepspeed.accelerator.vendors",
    "deepspeed.accelerator.mps_accelerator": "deepspeed.accelerator.vendors",
    "deepspeed.accelerator.npu_accelerator": "deepspeed.accelerator.vendors",
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator",
    "deepspeed.accelerator.sdaa_accelerator": "deepspeed.accelerator.vendors",
    "deepspeed.accelerator.xpu_accelerator": "deepspeed.accelerator.vendors",
    "deepspeed.autotuning.config": "deepspeed.config.autotuning",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.compile.config": "deepspeed.config.compile",
    "deepspeed.git_version_info": "deepspeed.published.git_version_info",
    "deepspeed.inference.config": "deepspeed.config.inference",
    "deepspeed.inference.v2.checkpoint": "deepspeed.inference.v2.engine_v2",
    "deepspeed.inference.v2.engine_factory": "deepspeed.inference.v2.engine_v2",
    "deepspeed.inference.v2.ragged.blocked_allocator": "deepspeed.inference.v2.ragged_cache",
    "deepspeed.inference.v2.ragged.kv_cache": "deepspeed.inference.v2.ragged_cache",
    "deepspeed.inference.v2.ragged.ragged_manager": "deepspeed.inference.v2.ragged_cache",
    "deepspeed.inference.v2.ragged.sequence_descriptor": "deepspeed.inference.v2.ragged_cache",
    "deepspeed.inference.v2.scheduling_utils": "deepspeed.inference.v2.engine_v2",
    "deepspeed.io.mock_file_writer": "deepspeed.io.fast_file_writer",
    "deepspeed.io.py_file_writer": "deepspeed.io.fast_file_writer",
    "deepspeed.moe.mappings": "deepspeed.moe.sharded_moe",
    "deepspeed.monitor.comet": "deepspeed.monitor.monitor",
    "deepspeed.monitor.csv_monitor": "deepspeed.monitor.monitor",
    "deepspeed.monitor.tensorboard": "deepspeed.monitor.monitor",
    "deepspeed.monitor.wandb": "deepspeed.monitor.monitor",
    "deepspeed.ops.adagrad.cpu_adagrad": "deepspeed.ops.adagrad",
    "deepspeed.ops.adam.cpu_adam": "deepspeed.ops.adam",
    "deepspeed.ops.adam.fused_adam": "deepspeed.ops.adam",
    "deepspeed.ops.deepspeed4science": "deepspeed.ops.evoformer",
    "deepspeed.ops.fp_quantizer.fp8_gemm": "deepspeed.ops.fp_quantizer",
    "deepspeed.ops.lamb.fused_lamb": "deepspeed.ops.lamb",
    "deepspeed.ops.lion.cpu_lion": "deepspeed.ops.lion",
    "deepspeed.ops.lion.fused_lion": "deepspeed.ops.lion",
    "deepspeed.ops.random_ltd.dropping_utils": "deepspeed.ops.random_ltd",
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": "deepspeed.transformers.sparse_attention",
    "deepspeed.ops.sparse_attention.matmul": "deepspeed.ops.sparse_attention.blocks",
    "deepspeed.ops.sparse_attention.softmax": "deepspeed.ops.sparse_attention.blocks",
    "deepspeed.ops.sparse_attention.sparse_attention_utils": "deepspeed.transformers.sparse_attention",
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": (
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine"
    ),
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": "deepspeed.data.curriculum",
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": "deepspeed.data.random_ltd",
    "deepspeed.runtime.data_pipeline.data_routing.helper": "deepspeed.data.random_ltd",
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": "deepspeed.data.random_ltd",
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": "deepspeed.data.analyzer",
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": "deepspeed.data.sampler",
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": "deepspeed.data.indexed_dataset",
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": "deepspeed.data.dynamic_batching",
    "deepspeed.runtime.domino.transformer": "deepspeed.tensor_parallel.domino",
    "deepspeed.runtime.eigenvalue": "deepspeed.compression.eigenvalue",
    "deepspeed.runtime.fp16.loss_scaler": "deepspeed.precision.loss_scaler",
    "deepspeed.runtime.fp16.onebit": "deepspeed.ops.onebit",
    "deepspeed.runtime.fp16.onebit.adam": "deepspeed.ops.onebit.adam",
    "deepspeed.runtime.fp16.onebit.lamb": "deepspeed.ops.onebit.lamb",
    "deepspeed.runtime.fp16.onebit.zoadam": "deepspeed.ops.onebit.zoadam",
    "deepspeed.runtime.hybrid_engine": "deepspeed.hybrid.engine",
    "deepspeed.runtime.pipe.dualpipev": "deepspeed.pipe.engine",
    "deepspeed.runtime.pipe.engine": "deepspeed.pipe.engine",
    "deepspeed.runtime.pipe.module": "deepspeed.pipe.module",
    "deepspeed.runtime.pipe.schedule": "deepspeed.pipe.schedule.views",
    "deepspeed.runtime.pipe.topology": "deepspeed.parallel.topology",
    "deepspeed.runtime.progressive_layer_drop": "deepspeed.data.pacing",
    "deepspeed.runtime.quantize": "deepspeed.compression.quantize",
    "deepspeed.runtime.rollout.base": "deepspeed.hybrid.rollout",
    "deepspeed.runtime.rollout.hybrid_engine_rollout": "deepspeed.hybrid.rollout",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": "deepspeed.sequence.parallel_state",
    "deepspeed.runtime.zenflow.zenflow_config": "deepspeed.config.zero",
    "deepspeed.runtime.zero.leaf_module_config": "deepspeed.config.zero",
    "deepspeed.runtime.zero.muon": "deepspeed.ops.muon",
    "deepspeed.runtime.zero.muon.muon_optimizer": "deepspeed.ops.muon",
    "deepspeed.runtime.zero.muon.original_muon": "deepspeed.ops.muon",
    "deepspeed.runtime.zero.offload_config": "deepspeed.config.zero",
    "deepspeed.runtime.zero.tiling": "deepspeed.zero.public.tiling",
    "deepspeed.sequence.autosp_detector": "deepspeed.sequence.auto_sp",
    "deepspeed.sequence.autosp_vit": "deepspeed.sequence.auto_sp",
    "deepspeed.utils.groups": "deepspeed.published.groups",
    "deepspeed.utils.init_on_device": "deepspeed.published.init_on_device",
    "deepspeed.utils.logging": "deepspeed.log",
    "deepspeed.utils.nvtx": "deepspeed.accelerator.nvtx",
    "deepspeed.utils.z3_leaf_module": "deepspeed.zero.public.leaf",
}


def names_at(home: str, names: str) -> dict[str, str]:
    """Names that are the same at one home."""
    return dict.fromkeys(names.split(), home)


STATE_ACCESS = names_at(
    "deepspeed.zero.public.access",
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized",
)

# old module → its names → home of each: "module" if the name is the same there, else "module:name"
SPLIT: dict[str, dict[str, str]] = {
    "deepspeed.checkpoint.deepspeed_checkpoint": {
        "ARGS_KEY": "deepspeed.published.constants",
        "CHECKPOINT_INFO_KEY": "deepspeed.published.constants",
        "DeepSpeedCheckpoint": "deepspeed.checkpoint",
    },
    "deepspeed.checkpoint.universal_checkpoint": {"SubparamShape": "deepspeed.checkpoint.utils"},
    "deepspeed.comm.config": {"CommsLoggerConfig": "deepspeed.config.monitor"},
    "deepspeed.comm.torch": {
        "TorchBackend": "deepspeed.published.runtime_names",
        "has_all_reduce_coalesced": "deepspeed.comm",
        "has_coalescing_manager": "deepspeed.comm",
    },
    "deepspeed.constants": names_at(
        "deepspeed.published.constants",
        "CROSS_RANK CROSS_SIZE TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    ),
    "deepspeed.elasticity.config": {
        **names_at("deepspeed.errors", "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize"),
        "ElasticityConfig": "deepspeed.config.elasticity",
    },
    "deepspeed.inference.quantization": {
        "_init_group_wise_weight_quantization": "deepspeed.inference.group_quantization",
    },
    "deepspeed.inference.quantization.layers": names_at(
        "deepspeed.inference.group_quantization", "QuantizedEmbedding QuantizedLinear"
    ),
    "deepspeed.inference.quantization.quantization": {
        "_init_group_wise_weight_quantization": "deepspeed.inference.group_quantization",
    },
    "deepspeed.inference.quantization.utils": names_at(
        "deepspeed.inference.group_quantization", "DeQuantizer Quantizer"
    ),
    "deepspeed.inference.v2.config_v2": {
        "DeepSpeedTPConfig": "deepspeed.config.inference:RaggedTensorParallelConfig",
        "QuantizationConfig": "deepspeed.config.inference:RaggedQuantizationConfig",
        "RaggedInferenceEngineConfig": "deepspeed.config.inference",
    },
    "deepspeed.inference.v2.inference_utils": {"DtypeEnum": "deepspeed.config.inference"},
    "deepspeed.inference.v2.ragged": {
        **names_at("deepspeed.config.inference", "AllocationMode DSStateManagerConfig"),
        **names_at(
            "deepspeed.inference.v2.ragged_cache",
            "BlockedAllocator BlockedKVCache DSSequenceDescriptor DSStateManager KVCacheConfig "
            "PlaceholderSequenceDescriptor RaggedBatchWrapper split_kv",
        ),
        "MemoryConfig": "deepspeed.config.inference:CacheMemoryConfig",
    },
    "deepspeed.inference.v2.ragged.manager_configs": {
        **names_at("deepspeed.config.inference", "AllocationMode DSStateManagerConfig"),
        **names_at("deepspeed.inference.v2.ragged_cache", "KVCacheConfig KVCacheType"),
        "MemoryConfig": "deepspeed.config.inference:CacheMemoryConfig",
    },
    "deepspeed.model_implementations": {"DeepSpeedTransformerInference": "deepspeed.inference.modules"},
    "deepspeed.module_inject": {
        "replace_transformer_layer": "deepspeed.inference.modules",
        "set_autotp_mode": "deepspeed.tensor_parallel.model_init",
    },
    "deepspeed.module_inject.layers": {
        "GatherReplacedLayerParams": "deepspeed.tensor_parallel.apply",
        "is_autotp_training_mode": "deepspeed.tensor_parallel.model_init",
        "set_autotp_mode": "deepspeed.tensor_parallel.model_init",
    },
    "deepspeed.module_inject.replace_module": {"replace_transformer_layer": "deepspeed.inference.modules"},
    "deepspeed.module_inject.replace_policy": {"HFGPT2LayerPolicy": "deepspeed.inference.modules"},
    "deepspeed.monitor.config": names_at(
        "deepspeed.config.monitor",
        "CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig",
    ),
    "deepspeed.nebula.config": {"DeepSpeedNebulaConfig": "deepspeed.published.config_utils"},
    "deepspeed.ops.adam.multi_tensor_apply": {"MultiTensorApply": "deepspeed.published.runtime_names"},
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": "deepspeed.runtime.base_optimizer:ZeroOptimizer"},
    "deepspeed.runtime.comm.coalesced_collectives": {
        **names_at(
            "deepspeed.zero.gradients.coded_collectives", "all_to_all_loco_quant_reduce all_to_all_quant_reduce"
        ),
        "reduce_scatter_coalesced": "deepspeed.comm.coalesced",
    },
    "deepspeed.runtime.comm.compressed": {"CompressedBackend": "deepspeed.comm.compressed"},
    "deepspeed.runtime.comm.mpi": {"MpiBackend": "deepspeed.comm.compressed:CompressedBackend"},
    "deepspeed.runtime.comm.nccl": {"NcclBackend": "deepspeed.comm.compressed:CompressedBackend"},
    "deepspeed.runtime.config": {
        **names_at(
            "deepspeed.published.constants",
            "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER "
            "ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER ZERO_ONE_ADAM_OPTIMIZER",
        ),
        "DeepSpeedConfig": "deepspeed.config",
        "DeepSpeedConfigError": "deepspeed.errors",
    },
    "deepspeed.runtime.config_utils": names_at(
        "deepspeed.published.config_utils",
        "DeepSpeedConfigModel dict_raise_error_on_duplicate_keys",
    ),
    "deepspeed.runtime.fp16.fused_optimizer": {
        "FP16_Optimizer": "deepspeed.runtime.base_optimizer:MixedPrecisionOptimizer",
    },
    "deepspeed.runtime.fp16.unfused_optimizer": {
        "FP16_UnfusedOptimizer": "deepspeed.runtime.base_optimizer:MixedPrecisionOptimizer",
    },
    "deepspeed.runtime.pipe": {
        **names_at("deepspeed.pipe", "LayerSpec PipelineModule TiedLayerSpec"),
        "ProcessTopology": "deepspeed.parallel.topology",
    },
    "deepspeed.runtime.precision_config": names_at(
        "deepspeed.config.precision", "DeepSpeedBF16Config DeepSpeedFP16Config"
    ),
    "deepspeed.runtime.rollout": names_at(
        "deepspeed.hybrid.rollout", "RolloutBatch RolloutEngine RolloutRequest SamplingConfig build_rollout"
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        **names_at(
            "deepspeed.sequence.tiling", "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP sequence_tiled_compute"
        ),
        "UlyssesSPAttentionHF": "deepspeed.sequence.ulysses",
        "UlyssesSPDataLoaderAdapter": "deepspeed.sequence.ulysses",
    },
    "deepspeed.runtime.state_dict_factory": names_at(
        "deepspeed.published.state_dict_factory",
        "MegatronSDLoader SDLoaderFactory",
    ),
    "deepspeed.runtime.tensor_parallel.config": names_at("deepspeed.config.parallel", "TPConfig TPTrainingConfig"),
    "deepspeed.runtime.utils": {
        **names_at(
            "deepspeed.published.runtime_names",
            "all_gather_dp_groups is_model_parallel_parameter move_to_device set_random_seed",
        ),
        "PartitionedTensor": "deepspeed.parallel.partitioned_tensor",
        "partition_balanced": "deepspeed.parallel.balance",
        "partition_uniform": "deepspeed.parallel.balance",
        "see_memory_usage": "deepspeed.profiling.memory",
    },
    "deepspeed.runtime.zero": {
        "GatheredParameters": "deepspeed.zero.public.gathered",
        "Init": "deepspeed.zero.birth.init",
        "MiCS_Init": "deepspeed.zero.birth.init",
        "ZeroParamStatus": "deepspeed.zero.parameters.shard",
        "ZeroParamType": "deepspeed.zero.parameters.shard",
        "register_external_parameter": "deepspeed.zero.parameters.module_hooks",
        "unregister_external_parameter": "deepspeed.zero.parameters.module_hooks",
        "unwrap_model_for_generation": "deepspeed.zero.public.gathered",
    },
    "deepspeed.runtime.zero.config": names_at(
        "deepspeed.config.zero",
        "DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig ZeroStageEnum",
    ),
    "deepspeed.runtime.zero.mics": {"MiCS_Init": "deepspeed.zero.birth.init"},
    "deepspeed.runtime.zero.offload_states": {"get_state_devices": "deepspeed.runtime.offload_states"},
    "deepspeed.runtime.zero.parameter_offload": {
        "DeepSpeedZeRoOffload": "deepspeed.zero.public.rehook:ParameterOffload",
        "ZeROOrderedDict": "deepspeed.zero.parameters.module_hooks:WatchedParameters",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "CUDAQuantizer": "deepspeed.ops.quantizer.quantizer",
        "DeepSpeedTensorOverride": "deepspeed.zero.birth.init",
        "GatheredParameters": "deepspeed.zero.public.gathered",
        "Init": "deepspeed.zero.birth.init",
        "ZeroParamStatus": "deepspeed.zero.parameters.shard",
        "ZeroParamType": "deepspeed.zero.parameters.shard",
        "partitioned_param_data_shape": "deepspeed.zero.public.views",
        "register_external_parameter": "deepspeed.zero.parameters.module_hooks",
        "unregister_external_parameter": "deepspeed.zero.parameters.module_hooks",
        "zero_wrapper_for_fp_tensor_constructor": "deepspeed.zero.birth.placement",
    },
    "deepspeed.runtime.zero.stage3": {
        **names_at(
            "deepspeed.memory",
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live",
        ),
        "DeepSpeedZeroOptimizer_Stage3": "deepspeed.runtime.base_optimizer:ZeroOptimizer",
        "unwrap_model_for_generation": "deepspeed.zero.public.gathered",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        **names_at(
            "deepspeed.memory",
            "estimate_zero1_model_states_mem_needs estimate_zero1_model_states_mem_needs_all_cold "
            "estimate_zero1_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs "
            "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live",
        ),
        "DeepSpeedZeroOptimizer": "deepspeed.runtime.base_optimizer:ZeroOptimizer",
    },
    "deepspeed.utils.comms_logging": {
        "CommsLogger": "deepspeed.comm.logger",
        "calc_bw_log": "deepspeed.comm.summary",
        "convert_size": "deepspeed.comm.summary",
    },
    "deepspeed.utils.numa": {"parse_range_list": "deepspeed.launcher.binding"},
    "deepspeed.utils.tensor_fragment": {
        "fragment_address": "deepspeed.checkpoint.formats.safe_load",
        **STATE_ACCESS,
    },
    "deepspeed.utils.timer": {
        **names_at(
            "deepspeed.published.constants",
            "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER BACKWARD_MICRO_TIMER "
            "BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER "
            "STEP_GLOBAL_TIMER STEP_MICRO_TIMER",
        ),
        "CudaEventTimer": "deepspeed.accelerator.clock",
        "NoopTimer": "deepspeed.profiling.timers",
        "SynchronizedWallClockTimer": "deepspeed.profiling.timers",
        "ThroughputTimer": "deepspeed.profiling.throughput",
    },
}

# module that exists → names that scripts find there and that live elsewhere → home of each, as above
REEXPORTED: dict[str, dict[str, str]] = {
    "deepspeed.checkpoint": {
        **names_at(
            "deepspeed.checkpoint.constants",
            "BASE_OPTIMIZER_STATE CAT_DIM OPTIMIZER_STATE_DICT ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM "
            "PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
            "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS PARAM_GROUPS PARAM_N_SUB_PARAMS "
            "PARAM_SHAPES PARAM_SLICE_MAPPINGS PIPELINE_REPLICATED_PARAMETER_PATTERNS SINGLE_PARTITION_OF_FP32_GROUPS "
            "SUB_PARAM_SHAPE TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_VERSION_KEY "
            "UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS VOCAB_TENSOR ZERO_STAGE",
        ),
    },
    "deepspeed.comm": {"TorchBackend": "deepspeed.published.runtime_names"},
    "deepspeed.env_report": {"cli_main": "deepspeed.env_report:main"},
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_PATHS": "deepspeed.launcher.environment:ENVIRONMENT_FOLDERS",
        "DLTS_HOSTFILE": "deepspeed.launcher.arguments:DEFAULT_HOSTFILE",
        "EXPORT_ENVS": "deepspeed.launcher.environment",
    },
    "deepspeed.ops.sparse_attention": names_at(
        "deepspeed.transformers.sparse_attention", "BertSparseSelfAttention SparseAttentionUtils"
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "_CUDA_RNG_STATE_TRACKER": "deepspeed.runtime.rng:_tracker",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME": "deepspeed.runtime.rng:MODEL_PARALLEL_RNG",
        "_set_cuda_rng_state": "deepspeed.published.runtime_names:set_device_rng_state",
    },
    "deepspeed.runtime.checkpoint_engine": names_at(
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine",
        "CheckpointEngine TorchCheckpointEngine",
    ),
    "deepspeed.runtime.engine": {
        "MoE": "deepspeed.moe.layer",
        "autocast_if_enabled": "deepspeed.published.runtime_names",
    },
}

_GRID = "deepspeed.checkpoint.DeepSpeedCheckpoint takes the degrees of another grid"
_VENDORS = (
    "the vendor's package registers its accelerator as a deepspeed.accelerators entry point, and ds_report says "
    "whether it is installed; deepspeed.ops.op_builder has the builders for all devices"
)
_EXPERTS = "the config's expert_parallel section runs the experts of a model: docs/moe.md"
_FAMILIES = "build_hf_engine serves the models of Transformers as they are, without layers of its own"
_INJECTED = "deepspeed.init_inference builds such layers where replace_with_kernel_inject is set"
_PINNED = "torch.Tensor.pin_memory, and pin_memory of the offload sections"
_SPLIT = "tensor_parallel.autotp_size and partition_config in the config split a model: docs/tensor_parallel.md"
_WRITERS = "checkpoint.writer in the config chooses how files are written: docs/checkpoints.md"
_ZENFLOW = "set zero_optimization.zenflow in the config"

# old module, or name of a module that stays, or ".*" for all others below it → what takes its place
REMOVED: dict[str, str] = {
    "deepspeed.checkpoint.ZeROCheckpoint": "deepspeed.checkpoint.DeepSpeedCheckpoint reads such a folder",
    "deepspeed.checkpoint.constants.*": "write keys of files as text",
    "deepspeed.checkpoint.ds_to_universal.*": "python -m deepspeed.checkpoint.ds_to_universal converts a folder",
    "deepspeed.checkpoint.enable_universal_checkpoint": "set checkpoint.load_universal in the config",
    "deepspeed.checkpoint.get_model_3d_descriptor": _GRID,
    "deepspeed.checkpoint.model_3d_desc": _GRID,
    "deepspeed.checkpoint.reshape_3d_utils": _GRID,
    "deepspeed.checkpoint.reshape_meg_2d": _GRID,
    "deepspeed.checkpoint.reshape_utils": _GRID,
    "deepspeed.checkpoint.universal_checkpoint.*": "set checkpoint.load_universal in the config",
    "deepspeed.checkpoint.zero_checkpoint": "deepspeed.checkpoint.DeepSpeedCheckpoint reads such a folder",
    "deepspeed.comm.backend": "deepspeed.comm.torch.TorchBackend is the one backend",
    "deepspeed.comm.constants": "write names of backends as text",
    "deepspeed.comm.utils": "deepspeed.comm has get_rank, get_local_rank and get_world_size",
    "deepspeed.data.indexed_dataset.*": (
        "use MMapIndexedDataset and MMapIndexedDatasetBuilder; write datasets of the older form (TNTIDX) again"
    ),
    "deepspeed.elasticity.constants": "write keys of the config as text",
    "deepspeed.elasticity.elastic_agent.DSElasticAgent": "deepspeed --elastic_training starts and restarts the ranks",
    "deepspeed.elasticity.utils": "every supported torch has the elastic launcher",
    "deepspeed.inference.v2.allocator": _FAMILIES,
    "deepspeed.inference.v2.inference_parameter": _FAMILIES,
    "deepspeed.inference.v2.inference_utils.*": _FAMILIES,
    "deepspeed.launcher.constants": "write names of launchers as text",
    "deepspeed.launcher.multinode_runner": "deepspeed --launcher starts ranks on other hosts: docs/launching.md",
    "deepspeed.module_inject.auto_tp": _SPLIT,
    "deepspeed.module_inject.auto_tp_model_utils": _SPLIT,
    "deepspeed.module_inject.autotp_config": _SPLIT,
    "deepspeed.module_inject.fusedqkv_utils": _SPLIT,
    "deepspeed.module_inject.layers.*": _SPLIT,
    "deepspeed.module_inject.replace_policy.*": (
        "give init_inference replace_with_kernel_inject, or injection_policy with names of layers"
    ),
    "deepspeed.module_inject.tp_plan_converter": _SPLIT,
    "deepspeed.module_inject.tp_shard": _SPLIT,
    "deepspeed.moe.ep_count": _EXPERTS,
    "deepspeed.moe.ep_experts": _EXPERTS,
    "deepspeed.moe.ep_kernels": _EXPERTS,
    "deepspeed.moe.ep_repack": _EXPERTS,
    "deepspeed.moe.ep_router": _EXPERTS,
    "deepspeed.moe.ep_tp_dispatch": _EXPERTS,
    "deepspeed.moe.fused_expert_layout": _EXPERTS,
    "deepspeed.ops.adam.ZenFlowSelectiveAdamW": _ZENFLOW,
    "deepspeed.ops.adam.ZenFlowSelectiveAdamW_stage3": _ZENFLOW,
    "deepspeed.ops.adam.zenflow_torch_adam": _ZENFLOW,
    "deepspeed.ops.op_builder.*": "import builders from deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.DeepCompileBuilder": "engine.compile() needs no op of its own",
    "deepspeed.ops.op_builder.UtilsBuilder": "use torch._utils._flatten_dense_tensors and _unflatten_dense_tensors",
    "deepspeed.ops.op_builder.builder.*": "subclass OpBuilder, which compiles CUDA sources too",
    "deepspeed.ops.op_builder.klxpu": _VENDORS,
    "deepspeed.ops.op_builder.supa": _VENDORS,
    "deepspeed.ops.transformer.DeepSpeedInferenceConfig": _INJECTED,
    "deepspeed.ops.transformer.inference": _INJECTED,
    "deepspeed.ops.triton_ops": "use deepspeed.HAS_TRITON",
    "deepspeed.precision.loss_scaler.CreateLossScaler": "construct LossScaler or DynamicLossScaler",
    "deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine": _WRITERS,
    "deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine": _WRITERS,
    "deepspeed.runtime.checkpoint_engine.utils": "assign a CheckpointEngine of your own to engine.checkpoint_engine",
    "deepspeed.runtime.compiler": "use torch.compiler, or engine.compile()",
    "deepspeed.runtime.config.*": "read the attributes of deepspeed.DeepSpeedConfig",
    "deepspeed.runtime.config_utils.*": "read a dict's keys with get; DeepSpeedConfigModel declares configs",
    "deepspeed.runtime.constants": "write keys of the config as text; DeepSpeedConfig knows the defaults",
    "deepspeed.runtime.domino.async_linear": "use DominoTransformer, or tensor_parallel.tp_overlap_comm in the config",
    "deepspeed.runtime.lr_schedules.*": "give type and params of a schedule in the config's scheduler section",
    "deepspeed.runtime.precision_config.*": "read the attributes of deepspeed.DeepSpeedConfig",
    "deepspeed.runtime.sparse_tensor": "set sparse_gradients in the config; gradients are sparse tensors of torch",
    "deepspeed.runtime.state_dict_factory.SDLoaderBase": "use MegatronSDLoader, which has all of its methods",
    "deepspeed.runtime.superoffload": "set zero_optimization.offload_optimizer.super_offload in the config",
    "deepspeed.runtime.swap_tensor": "the config's sections for offload use the disk: docs/offload.md",
    "deepspeed.runtime.tensor_parallel.init_utils": "read the attributes of deepspeed.DeepSpeedConfig",
    "deepspeed.runtime.tensor_parallel.tp_manager": "use deepspeed.tp_model_init",
    "deepspeed.runtime.torch_autocast": "set torch_autocast in the config; engine.torch_autocast_dtype() tells it",
    "deepspeed.runtime.utils.*": "the engine clips and checks gradients; torch.nn.utils clips others",
    "deepspeed.runtime.zero.contiguous_memory_allocator": "torch's allocator keeps large segments",
    "deepspeed.runtime.zero.linear": "torch's Linear keeps no whole weight at stage 3; leave it as it is",
    "deepspeed.runtime.zero.mics.*": "deepspeed.initialize trains by zero_optimization.mics_shard_size",
    "deepspeed.runtime.zero.mics_utils": "engine.mics_shard_size() tells how many ranks share one set of shards",
    "deepspeed.runtime.zero.parameter_offload.*": "deepspeed.initialize hooks the modules of a model",
    "deepspeed.runtime.zero.partition_parameters.*": "use deepspeed.zero.Init and deepspeed.zero.GatheredParameters",
    "deepspeed.runtime.zero.utils": "errors are in deepspeed.errors; a sharded parameter has the attribute ds_id",
    "deepspeed.sequence.autosp_fusion": "insert the features of images before ranks divide the sequence",
    "deepspeed.sequence.cross_entropy.*": "set tensor_parallel.vocab_parallel_lm_head in the config",
    "deepspeed.sequence.layer.*": "use DistributedAttention, or sequence_parallel_size in the config",
    "deepspeed.sequence.linear_cross_entropy": "set sequence_parallel.tiled_loss in the config",
    "deepspeed.sequence.vocab_parallel_ops": "vocab_parallel_cross_entropy(..., reduction='none') is -log(p)",
    "deepspeed.set_optimizer_flags": "give parameter groups use_muon; else the engine chooses matrices for Muon",
    "deepspeed.utils.bwc": "ask the mpu itself",
    "deepspeed.utils.debug": "use model.named_parameters() and a parameter's ds_summary()",
    "deepspeed.utils.init_distributed": "use deepspeed.init_distributed",
    "deepspeed.utils.mixed_precision_linkage": "use safe_get_* and safe_set_* of deepspeed.utils",
    "deepspeed.utils.pin_memory": _PINNED,
    "deepspeed.utils.pin_memory_tracker": _PINNED,
    "deepspeed.utils.tensor_fragment.*": "use safe_get_* and safe_set_* of deepspeed.utils",
    "deepspeed.utils.timer.trim_mean": "use scipy.stats.trim_mean",
    "deepspeed.utils.torch": "compare torch.__version__",
    "deepspeed.utils.types": "name an activation as torch does",
    "deepspeed.utils.zero_to_fp32.*": "python -m deepspeed.checkpoint convert writes weights of any dtype",
}

_TORCHAO = "torchao and PEFT quantise models, and engines of this library train them"
_SCHEDULE = "engine.compile() takes a schedule, and docs/compile.md describes it"
_GENERATE = "use deepspeed.init_inference or deepspeed.inference.LLM"

# module or name of a feature that is still to come, with all below it → what to use meanwhile
COMING: dict[str, str] = {
    "deepspeed.compile.constants": _SCHEDULE,
    "deepspeed.compile.list_schedule": _SCHEDULE,
    "deepspeed.compile.z3_eager_fallback": _SCHEDULE,
    "deepspeed.runtime.compression": _TORCHAO,
    "deepspeed.runtime.hybrid_engine_graph": _GENERATE,
    "deepspeed.runtime.rollout.continuous_batching": "engine.generate runs a schedule of its own",
    "deepspeed.runtime.rollout.opsd": "compute the loss from the logits of both models",
    "deepspeed.runtime.weight_quantizer": "deepspeed.linear and init_inference(quant=...) let weights rest in few bits",
}
