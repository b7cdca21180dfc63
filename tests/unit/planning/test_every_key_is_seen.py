"""A plan sees every key of the config that changes memory or bytes; the others are listed here, with the reason.

A new key fails the first test until it is in one of the two tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from deepspeed.config.schema import Schema
from deepspeed.memory.savings import merged
from deepspeed.planning import Plan, plan
from tests.architecture.test_config_keys import fields_of, nested
from tests.harness import ranks
from tests.unit.planning.planned import Decoder, config, example_batch


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


AWAY = {"device": "cpu"}
FP32 = {"bf16": {"enabled": False}}
BASES = {
    "stage 0": config(0),
    "stage 1": config(1, 2),
    "stage 2": config(2, 2),
    "stage 3": config(3, 2),
    "no prefetch": merged(config(3, 2), zero(stage3_prefetch_bucket_size=0)),
    "fp32": config(2, **FP32),
    "offload": merged(config(3, 2), zero(offload_optimizer=AWAY, offload_param=AWAY)),
    "buffers": {**config(2), "data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": []}},
    "unclipped": {**config(2), "gradient_clipping": 0.0},
    "codes": merged(config(2), zero(zero_quantized_gradients=True)),
}
SEEN = {
    "batch": [
        ("stage 2", {"train_micro_batch_size_per_gpu": 4}),
        ("stage 2", {"gradient_accumulation_steps": 3}),
        ("stage 2", {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "moment_bits": 8}}}),
        ("stage 2", {"gradient_clipping": 0.0}),
        ("stage 0", {"communication_data_type": "fp32"}),
        ("stage 2", {"sequence_parallel_size": 2}),
        ("unclipped", {"optimizer_in_backward": {"enabled": True}}),
    ],
    "precision": [
        ("fp32", {"fp16": {"enabled": True}}),
        ("fp32", {"bf16": {"enabled": True}}),
        ("stage 2", {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
        ("fp32", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        ("stage 2", {"data_types": {"grad_accum_dtype": "fp32"}}),
        ("stage 2", {"data_types": {"buffer_dtype": "bf16"}}),
        ("buffers", {"data_types": {"keep_in_fp32_modules": ["table"]}}),
        ("stage 2", {"fused_kernels": {"enabled": True}}),
        ("stage 2", {"fp8": {"enabled": True}}),
    ],
    "gradients": [
        ("stage 0", zero(stage=1)),
        ("stage 1", zero(stage=2)),
        ("stage 2", zero(overlap_comm=False)),
        ("stage 2", zero(reduce_scatter=False)),
        ("stage 2", zero(reduce_bucket_size=500_000)),
        ("stage 2", zero(contiguous_gradients=False)),
        ("stage 2", zero(round_robin_gradients=True)),
        ("stage 2", zero(allgather_bucket_size=1000)),
    ],
    "stage 3": [
        ("stage 3", zero(sub_group_size=10_000)),
        ("stage 3", zero(stage3_prefetch_bucket_size=0)),
        ("stage 3", zero(stage3_param_persistence_threshold=10_000)),
        ("stage 3", zero(stage3_param_persistence_threshold=10_000, stage3_model_persistence_threshold=0)),
        ("stage 3", zero(stage3_max_live_parameters=0)),
        ("stage 3", zero(stage3_max_reuse_distance=10**9)),
        ("stage 3", zero(stage3_module_granularity_threshold=10**9)),
        ("stage 3", zero(stage3_use_all_reduce_for_fetch_params=True)),
        ("stage 3", zero(stage3_allgather_sequential=True)),
        ("no prefetch", zero(leaf_module={"names": ["blocks.1"]})),
    ],
    "offload": [
        ("stage 3", zero(offload_param=AWAY)),
        ("stage 2", zero(offload_optimizer=AWAY)),
        ("stage 3", zero(offload_optimizer={**AWAY, "ratio": 0.5})),
        ("offload", zero(offload_optimizer={"super_offload": True})),
        ("stage 3", {"memory": {"device": 200_000}}),
    ],
    "zero++": [
        ("stage 3", zero(zero_hpz_partition_size=2)),
        ("stage 3", zero(zero_quantized_weights=True)),
        ("stage 2", zero(zero_quantized_gradients=True)),
        ("codes", zero(zeropp_loco_param={"err_beta": 0.8, "reset_T": 16})),
        ("stage 3", zero(mics_shard_size=2)),
    ],
}
UNSEEN = {
    "it is for the loader, which works it out before an engine is built": (
        *("strict", "train_batch_size", "managed_gradient_accumulation", "elasticity", "data_types.param_dtype"),
        *("zero_allow_untested_optimizer", "zero_optimization.legacy_stage1", "data_parallel_size"),
    ),
    "the loader says that it has no effect": (
        *("optimizer.legacy_fusion", "bf16.immediate_grad_update", "zero_optimization.allgather_partitions"),
        *("zero_optimization.memory_efficient_linear", "zero_optimization.elastic_checkpoint", "allgather_size"),
        *("zero_optimization.save_muon_momentum_buffer_in_memory", "disable_allgather", "graph_harvesting", "amp"),
        *("datastates_ckpt", "nebula", "zero_optimization.log_trace_cache_warnings"),
    ),
    "it changes values and leaves shapes as they are": (
        *("scheduler", "nonfinite_gradients", "gradient_allreduce_op", "gradient_predivide_factor", "fp16"),
        *("prescale_gradients", "bf16.check_grad_overflow", "optimizer_in_backward.clip_by_last_norm"),
        *("fp8.scaling", "seq_parallel_communication_data_type"),
        *("eigenvalue", "quantize_training", "zero_optimization.ignore_unused_parameters"),
    ),
    "it says whether a number is reported": ("zero_optimization.compute_grad_norm",),
    "it is for construction, saving, loading or a call of a script": (
        *("checkpoint", "zero_optimization.stage3_gather_16bit_weights_on_model_save", "compile"),
        *("zero_optimization.load_from_fp32_weights", "zero_optimization.pipeline_loading_checkpoint"),
        *("zero_optimization.override_module_apply", "hybrid_engine", "weight_quantization", "compression_training"),
        *("zero_optimization.enable_sanity_checks", "dataloader_drop_last", "disable_python_gc", "log_level"),
    ),
    "it only watches, and a plan leaves it out": (
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "hangs", "comms_logger"),
        *("memory_profiler", "flops_profiler", "events", "trace", "timers", "verify", "tensorboard", "wandb"),
        *("comet", "csv_monitor", "autotuning"),
    ),
    "a plan refuses files, of which this is a part": (
        *("zero_optimization.offload_param", "zero_optimization.offload_optimizer", "aio", "memory"),
    ),
    "it says how a section that is seen as a whole works in detail": (
        *("fused_kernels", "fp8.exclude", "torch_autocast", "sequence_parallel", "optimizer"),
        *("zero_optimization.zero_quantized_weights_format", "zero_optimization.zenflow", "bf16"),
        *("zero_optimization.leaf_module", "zero_optimization.parameter_alignment"),
    ),
    "the model of this test has no such layers; plans of them are compared in other tests": (
        *("pipeline", "tensor_parallel", "expert_parallel", "use_data_before_expert_parallelism"),
        *("activation_checkpointing", "sparse_attention", "sparse_gradients", "vocabulary_size"),
        "zero_optimization.zero_quantized_nontrainable_weights",
    ),
    "the numbers of a step depend on data or on the number of the step": (
        *("data_efficiency", "curriculum_learning", "progressive_layer_drop"),
    ),
    "on a pretended rank no rank owns a bucket alone": ("zero_optimization.use_multi_rank_bucket_allreduce",),
    "shards of one node, such as those of this test, are gathered in one hop": (
        "zero_optimization.mics_hierarchical_params_gather",
    ),
    "it is a choice of a device's implementation": ("zero_force_ds_cpu_optimizer",),
}


def flat(keys: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in keys.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")


def below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith((f"{prefix}.", f"{prefix}["))


def test_every_key_is_seen_or_has_a_reason():
    leaves = [path for path, field in fields_of(Schema) if nested(field.annotation)[0] is None]
    seen = {path for cases in SEEN.values() for _, keys in cases for path in flat(keys)}
    reasons = [prefix for prefixes in UNSEEN.values() for prefix in prefixes]
    assert len(set(reasons)) == len(reasons), "one reason each"
    lost = [path for path in leaves if path not in seen and not any(below(path, prefix) for prefix in reasons)]
    assert lost == [], "a plan must see what these change: add a case to SEEN, or a reason to UNSEEN"
    known = [path for path, _ in fields_of(Schema)]
    idle = [prefix for prefix in reasons if not any(below(path, prefix) and path not in seen for path in known)]
    assert idle == [], "there are no such keys, or a case sees them"


class Model(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(5000))


def planned(values: dict[str, Any]) -> Plan:
    return plan(Model, values, world=4, per_node=2, inputs=example_batch)


def shown(found: Plan) -> tuple[Any, ...]:
    """What a plan says of memory, bytes and work."""
    first = found.largest
    work = {(each.phase, each.name, each.dtype, each.count) for each in first.work}
    return first.kinds, first.sizes, first.host, first.collectives, work, first.overlaps


@pytest.mark.parametrize("group", SEEN)
@ranks(1, init=False)
def test_a_plan_changes_with_the_key(group):
    bases: dict[str, Any] = {}
    for name, keys in SEEN[group]:
        if name not in bases:
            bases[name] = shown(planned(BASES[name]))
        assert shown(planned(merged(BASES[name], keys))) != bases[name], (name, keys)


@ranks(1, init=False)
def test_the_same_config_gives_the_same_plan():
    assert shown(planned(BASES["offload"])) == shown(planned(BASES["offload"]))
