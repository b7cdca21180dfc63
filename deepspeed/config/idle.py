"""Keys that are valid and change nothing here: one table with the reasons, so that they are told and never silent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass

from deepspeed.config.clean import Problem
from deepspeed.config.compile import CompileConfig
from deepspeed.config.explain import values_of
from deepspeed.config.features import data_techniques
from deepspeed.config.schema import Schema

__all__ = ["IDLE", "Idle", "idle"]


def _always(schema: Schema) -> bool:
    return True


@dataclass(frozen=True)
class Idle:
    """A key, or every key of a section, that has no effect while `when` holds."""

    path: str
    why: str
    when: Callable[[Schema], bool] = _always
    switch: str = ""
    """The key that would turn the section on; off, it has the effect that is meant."""

    def covers(self, path: str) -> bool:
        """True for the key itself and for what lies in it."""
        return path != self.switch and (path == self.path or path.startswith(f"{self.path}."))


_IN_THE_MODULE = "PipelineModule decides it, by its arguments"
_BY_STRUCTURE = "experts are recognised by their structure: parameters of the shape [experts, …]"
_OWN_ROUTER = "router and shared experts of a block stay as the model has them"
_SLICES = "a rank sends what it has to the rank with the same slice, which needs all of it"


def _wants_data_efficiency(schema: Schema) -> bool:
    data = schema.data_efficiency
    asked = data.enabled or data.data_sampling.enabled or data.data_routing.enabled
    return asked and not data_techniques(schema)


_OPTIMIZER, _PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def _device(schema: Schema, name: str) -> str:
    block = getattr(schema.zero_optimization, name)
    return "none" if block is None else str(getattr(block.device, "value", block.device))


def _not_on_disk(name: str) -> Callable[[Schema], bool]:
    return lambda schema: _device(schema, name) != "nvme"


def _no_limit(schema: Schema) -> bool:
    return schema.memory.device is None


IDLE: tuple[Idle, ...] = (
    Idle("optimizer.legacy_fusion", "every optimizer takes the same step path"),
    Idle(
        "zero_force_ds_cpu_optimizer",
        "zero_optimization.offload_optimizer is off, so no optimizer runs on the CPU for a GPU",
        lambda c: not c.zero_optimization.offloads_optimizer,
    ),
    Idle("bf16.immediate_grad_update", "gradients are always summed as backward brings them"),
    Idle("allgather_size", "write zero_optimization.allgather_bucket_size"),
    Idle("disable_allgather", "how parameters are gathered follows from the ZeRO stage"),
    Idle("zero_optimization.allgather_partitions", "updated parameters are always gathered in buckets"),
    Idle("zero_optimization.memory_efficient_linear", "no layer keeps a whole weight for backward at stage 3"),
    Idle("zero_optimization.elastic_checkpoint", "every checkpoint loads at any world size"),
    Idle("zero_optimization.pipeline_loading_checkpoint", "a rank reads only its own part of the files"),
    Idle("zero_optimization.save_muon_momentum_buffer_in_memory", "the momentum is kept where the other states are"),
    Idle(
        "zero_optimization.mics_hierarchical_params_gather",
        "zero_optimization.mics_shard_size, which makes the groups, is not given",
        lambda c: c.zero_optimization.mics_shard_size < 1,
    ),
    Idle(
        "aio",
        "neither offload_optimizer nor offload_param of zero_optimization has the device nvme, and memory.disk is not "
        "given; the checkpoint writer has its own keys, checkpoint.writer",
        lambda c: not c.memory.disk and "nvme" not in (_device(c, "offload_optimizer"), _device(c, "offload_param")),
    ),
    *(
        Idle(f"memory.{key}", "memory.device is not given, so that all states are on the device", _no_limit)
        for key in ("host", "disk", "path")
    ),
    *(
        Idle(f"{_OPTIMIZER}.{key}", f"{_OPTIMIZER}.device is not nvme", _not_on_disk("offload_optimizer"))
        for key in ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write")
    ),
    *(
        Idle(f"{_PARAM}.{key}", f"{_PARAM}.device is not nvme", _not_on_disk("offload_param"))
        for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
    ),
    Idle(f"{_OPTIMIZER}.fast_init", "moments on NVMe are written by the first step and never before"),
    Idle(
        f"{_OPTIMIZER}.cpuadam_cores_perc",
        f"{_OPTIMIZER}.super_offload is off",
        lambda c: not (c.zero_optimization.offload_optimizer and c.zero_optimization.offload_optimizer.super_offload),
    ),
    Idle(
        "tensor_parallel",
        "tensor_parallel.autotp_size is below 2, so that layers are not split",
        lambda c: c.tensor_parallel.autotp_size < 2,
        switch="tensor_parallel.autotp_size",
    ),
    *(
        Idle(
            f"sequence_parallel.{key}",
            "sequence_parallel_size is below 2, so that sequences are not shared out",
            lambda c: (c.sequence_parallel_size or 1) < 2,
        )
        for key in ("attention", "ulysses_size")
    ),
    Idle(
        "activation_checkpointing.keep_last_count",
        "activation_checkpointing.cpu_checkpointing is off",
        lambda c: not c.activation_checkpointing.cpu_checkpointing,
    ),
    Idle(
        "sequence_parallel.ulysses_size",
        "sequence_parallel.attention is not given, so that the script shares sequences out",
        lambda c: (c.sequence_parallel_size or 1) > 1 and c.sequence_parallel.attention is None,
    ),
    *(
        Idle(f"tensor_parallel.{key}", why)
        for key, why in (
            ("partition_config.embedding_partition_dim", "embeddings are split by vocabulary"),
            ("partition_config.tp_size", "tensor_parallel.autotp_size is the number of ranks"),
            ("replace_with_kernel_inject", "kernels are injected for inference only"),
            ("kernel_inject", "kernels are injected for inference only"),
        )
    ),
    Idle(
        "expert_parallel",
        "expert_parallel.enabled is false, so that experts are not spread",
        lambda c: not c.expert_parallel.enabled,
        switch="expert_parallel.enabled",
    ),
    *(
        Idle(f"expert_parallel.{key}", why)
        for keys, why in (
            (("preset_model", "num_experts_attr", "expert_w1", "expert_w2", "expert_w3"), _BY_STRUCTURE),
            (("top_k_attr", "router_pattern", "has_shared_experts"), _OWN_ROUTER),
            (("shared_experts_pattern", "shared_experts_gate_pattern"), _OWN_ROUTER),
            (("disable_triton_grouped_mm",), "torch's grouped product is the one that there is"),
            (("gate_up_impl",), "gate and up are one product where the model keeps them as one"),
            (("combine_impl", "row_weighting_impl"), "outputs are always weighted and summed in float32 by one pass"),
            (("comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank"), "they belong to comm_backend deepep"),
            (("async_split_plan",), "numbers of tokens travel as soon as the router has chosen"),
        )
        for key in keys
    ),
    Idle(
        "expert_parallel.validate_folding_routing",
        "tensor_parallel.autotp_size is 1, so that no two ranks have the same tokens",
        lambda c: c.axis_sizes["tp"] == 1,
    ),
    Idle(
        "fused_kernels",
        "fused_kernels.enabled is false, so that modules stay as they are",
        lambda c: not c.fused_kernels.enabled,
        switch="fused_kernels.enabled",
    ),
    Idle(
        "fp8",
        "fp8.enabled is false, so that products keep their precision",
        lambda c: not c.fp8.enabled,
        switch="fp8.enabled",
    ),
    Idle(
        "flops_profiler",
        "flops_profiler.enabled is false, so that no step is profiled",
        lambda c: not c.flops_profiler.enabled,
        switch="flops_profiler.enabled",
    ),
    Idle(
        "memory_profiler",
        "memory_profiler.enabled is false, so that no step is profiled",
        lambda c: not c.memory_profiler.enabled,
        switch="memory_profiler.enabled",
    ),
    Idle("elasticity.min_time", "it is for schedulers, who decide whether a job is worth starting"),
    *(Idle(f"pipeline.{key}", _IN_THE_MODULE) for key in ("stages", "partition", "seed_layers")),
    *(Idle(f"pipeline.{key}", _SLICES) for key in ("pipe_partitioned", "grad_partitioned")),
    Idle("checkpoint.parallel_write", "every file is written by one rank, and different ranks write at the same time"),
    Idle(
        "optimizer_in_backward.clip_by_last_norm",
        "optimizer_in_backward.enabled is false, or gradient_clipping is 0",
        lambda c: not c.optimizer_in_backward.enabled or c.gradient_clipping <= 0,
    ),
    *(
        Idle(
            f"compile.{key}",
            "it belongs to compile.deepcompile, which is off",
            lambda c: not c.compile.deepcompile,
        )
        for key in CompileConfig.model_fields
        if key not in ("deepcompile", "region")
    ),
    Idle("checkpoint.writer.data_parallel", "which rank writes what follows from the ZeRO stage"),
    Idle(
        "weight_quantization",
        "only quantized_initialization and post_init_quant say what is quantised",
        lambda c: not (c.weight_quantization.quantized_initialization or c.weight_quantization.post_init_quant),
    ),
    Idle("data_efficiency", "none of its techniques has its own switch on", _wants_data_efficiency),
)
"""In the order of the schema."""


def idle(schema: Schema, given: Container[str], rows: tuple[Idle, ...] = IDLE) -> list[Problem]:
    """Which of the `given` keys have no effect, a line for each row; a value that is the default asks for nothing."""
    changed = [path for path, value, _ in values_of(schema) if path in given and _differs(path, value)]
    notes = []
    for row in rows:
        keys = [path for path in changed if row.covers(path)]
        if keys and row.when(schema):
            notes.append(Problem(", ".join(keys), f"no effect: {row.why}"))
    return notes


@functools.cache
def _defaults() -> dict[str, object]:
    return {path: value for path, value, _ in values_of(Schema())}


def _differs(path: str, value: object) -> bool:
    default = _defaults().get(path)
    # Some keys hold Python objects, which need not know what equality is.
    return value is not None if default is None else value != default
