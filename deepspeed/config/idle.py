"""Keys that are valid and change nothing here: one table with the reasons, so that they are told and never silent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from operator import attrgetter

from deepspeed.config.clean import Problem
from deepspeed.config.compile import CompileConfig
from deepspeed.config.explain import values_of
from deepspeed.config.features import data_techniques
from deepspeed.config.offload import OffloadDeviceEnum
from deepspeed.config.schema import Schema
from deepspeed.config.shape import walk

__all__ = ["IDLE", "Idle", "idle", "unused_by_model"]


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
    unless: str = ""
    """A key that says the same where it is given: a section that is switched off needs no word."""

    def covers(self, path: str) -> bool:
        """True for the key itself and for what lies in it."""
        return path != self.switch and (path == self.path or path.startswith(f"{self.path}."))


_IN_THE_MODULE = "PipelineModule decides it, by its arguments"
_NO_SEQUENCES = "sequence_parallel_size is below 2, so that sequences are not shared out"
_BY_STRUCTURE = "experts are recognised by their structure: parameters of the shape [experts, …]"
_OWN_ROUTER = "router and shared experts of a block stay as the model has them"
_SLICES = "a rank sends what it has to the rank with the same slice, which needs all of it"


def _wants_data_efficiency(schema: Schema) -> bool:
    data = schema.data_efficiency
    asked = data.enabled or data.data_sampling.enabled or data.data_routing.enabled
    return asked and not data_techniques(schema)


_OPTIMIZER, _PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def _sharded(schema: Schema) -> bool:
    return int(schema.zero_optimization.stage) == 3


def _keeps_states(schema: Schema) -> bool:
    return not schema.zero_optimization.offloads_optimizer


def _on_disk(schema: Schema, name: str) -> bool:
    block = getattr(schema.zero_optimization, name)
    return block is not None and block.device == OffloadDeviceEnum.nvme


def _switched() -> Iterator[Idle]:
    """The sections that are off unless their `enabled` is given; a section inside of one says nothing more."""
    found: list[str] = []
    for path, key in walk(Schema):
        inner = path.startswith(tuple(f"{section}." for section in found))
        if key.json == "enabled" and key.info.default is False and not inner:
            found.append(path.removesuffix(".enabled").removesuffix(".shared_parameters"))
            yield Idle(found[-1], f"{path} is not given, and false by default", _is_off(path), unless=path)


def _is_off(switch: str) -> Callable[[Schema], bool]:
    return lambda schema: not attrgetter(switch)(schema)


def _no_limit(schema: Schema) -> bool:
    return schema.memory.device is None


IDLE: tuple[Idle, ...] = (
    Idle("optimizer.legacy_fusion", "every optimizer takes the same step path"),
    Idle(
        "zero_force_ds_cpu_optimizer",
        "zero_optimization.offload_optimizer is off, so no optimizer runs on the CPU for a GPU",
        _keeps_states,
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
        lambda c: not (c.memory.disk or c.zero_optimization.swap_folders),
    ),
    *(
        Idle(f"memory.{key}", "memory.device is not given, so that all states are on the device", _no_limit)
        for key in ("host", "disk", "path")
    ),
    *(
        Idle(f"{_OPTIMIZER}.{key}", f"{_OPTIMIZER}.device is not nvme", lambda c: not _on_disk(c, "offload_optimizer"))
        for key in ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write")
    ),
    Idle(
        _PARAM,
        "zero_optimization.stage is below 3, so that every rank has all parameters on its device",
        lambda c: not _sharded(c),
    ),
    *(
        Idle(
            f"{_PARAM}.{key}",
            f"{_PARAM}.device is not nvme",
            lambda c: _sharded(c) and not _on_disk(c, "offload_param"),
        )
        for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
    ),
    *(
        Idle(f"{_OPTIMIZER}.{key}", f"{_OPTIMIZER}.device is not given", _keeps_states, unless=f"{_OPTIMIZER}.device")
        for key in ("pin_memory", "ratio", "super_offload")
    ),
    Idle(
        f"{_PARAM}.pin_memory",
        f"{_PARAM}.device is not given",
        lambda c: _sharded(c) and not c.zero_optimization.offloads_parameters,
        unless=f"{_PARAM}.device",
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
            _NO_SEQUENCES,
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
    Idle("elasticity.min_time", "it is for schedulers, who decide whether a job is worth starting"),
    *(Idle(f"pipeline.{key}", _IN_THE_MODULE) for key in ("stages", "partition", "seed_layers")),
    *(Idle(f"pipeline.{key}", _SLICES) for key in ("pipe_partitioned", "grad_partitioned")),
    Idle("checkpoint.parallel_write", "every file is written by one rank, and different ranks write at the same time"),
    Idle(
        "optimizer_in_backward.clip_by_last_norm",
        "gradient_clipping is 0",
        lambda c: c.gradient_clipping <= 0,
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
    Idle(
        "timers.throughput.synchronized",
        "steps_per_print is not given, so that no throughput is measured",
        lambda c: c.steps_per_print in (None, math.inf),
    ),
    Idle("data_efficiency", "none of its techniques has its own switch on", _wants_data_efficiency),
    *_switched(),
)
"""In the order of the schema; then the sections that are off."""


def unused_by_model(*, staged: bool, experts: bool, shared_sequences: bool) -> tuple[Idle, ...]:
    """The rows that depend on what the config does not say: the kind of the model, and the layout of an mpu."""
    rows = {
        Idle("pipeline", "the model is not a PipelineModule"): staged,
        Idle("use_data_before_expert_parallelism", "the model has no experts that lie on several ranks"): experts,
        Idle("seq_parallel_communication_data_type", _NO_SEQUENCES): shared_sequences,
    }
    return tuple(row for row, used in rows.items() if not used)


def idle(schema: Schema, given: Container[str], rows: tuple[Idle, ...] = IDLE) -> list[Problem]:
    """Which of the `given` keys have no effect, a line for each row; a value that is the default asks for nothing."""
    changed = [path for path, value, _ in values_of(schema) if path in given and _differs(path, value)]
    notes = []
    for row in rows:
        keys = [path for path in changed if row.covers(path)]
        said = row.unless != "" and row.unless in given
        if keys and not said and row.when(schema):
            notes.append(Problem(", ".join(keys), f"no effect: {row.why}"))
    return notes


@functools.cache
def _defaults() -> dict[str, object]:
    return {path: value for path, value, _ in values_of(Schema())}


def _differs(path: str, value: object) -> bool:
    default = _defaults().get(path)
    # Some keys hold Python objects, which need not know what equality is.
    return value is not None if default is None else value != default
