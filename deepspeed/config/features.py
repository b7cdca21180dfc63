"""The features that the schema knows and this version does not have: one table, one check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.config.clean import Problem
from deepspeed.config.model import DeepSpeedConfigModel
from deepspeed.config.optimizer import ONE_BIT_OPTIMIZERS
from deepspeed.config.schema import Schema
from deepspeed.errors import FeatureUnavailable

__all__ = ["UNBUILT", "Feature", "data_techniques", "missing_first", "require", "unbuilt"]


@dataclass(frozen=True)
class Feature:
    """A key that asks for something this version does not have."""

    path: str
    name: str
    asked: Callable[[Schema], bool]
    instead: str = "remove the key or turn it off"
    conditional: bool = False
    """The key exists; it is only its combination with others that does not."""

    @property
    def problem(self) -> Problem:
        """What is told where it is asked for."""
        return Problem(self.path, f"{self.name}: not part of this version yet; {self.instead}")


def _switched_on(section: DeepSpeedConfigModel) -> bool:
    """True if the section, or any section in it, has its `enabled` on."""
    values = dict(section)
    nested = [value for value in values.values() if isinstance(value, DeepSpeedConfigModel)]
    return values.get("enabled") is True or any(_switched_on(inner) for inner in nested)


def data_techniques(schema: Schema) -> bool:
    """The outer switches of `data_efficiency` turn nothing on by themselves; the techniques do."""
    data = schema.data_efficiency
    inner = (*dict(data.data_sampling).values(), *dict(data.data_routing).values())
    return any(isinstance(section, DeepSpeedConfigModel) and _switched_on(section) for section in inner)


def _given(key: str, schema: Schema) -> bool:
    """Whether a key of `expert_parallel` asks for something."""
    section = schema.expert_parallel
    return section.enabled and getattr(section, key) != type(section).model_fields[key].default


UNBUILT: tuple[Feature, ...] = (
    Feature("aio.use_gds", "GPUDirect Storage", lambda c: c.aio.use_gds),
    Feature(
        "zero_optimization.zero_hpz_partition_size", "hpZ", lambda c: c.zero_optimization.zero_hpz_partition_size > 1
    ),
    Feature("zero_optimization.zero_quantized_weights", "qwZ", lambda c: c.zero_optimization.zero_quantized_weights),
    Feature(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "quantised frozen weights",
        lambda c: c.zero_optimization.zero_quantized_nontrainable_weights,
    ),
    Feature(
        "zero_optimization.zero_quantized_gradients", "qgZ", lambda c: c.zero_optimization.zero_quantized_gradients
    ),
    Feature("zero_optimization.zeropp_loco_param", "LoCo", lambda c: c.zero_optimization.zeropp_loco_param is not None),
    Feature("zero_optimization.mics_shard_size", "MiCS", lambda c: c.zero_optimization.mics_shard_size > 0),
    Feature(
        "fused_kernels.loss",
        "the fused loss of sequences that ranks share (sequence_parallel.attention)",
        lambda c: c.fused_kernels.enabled and c.fused_kernels.loss and c.sequence_parallel.attention is not None,
        conditional=True,
    ),
    Feature(
        "sequence_parallel.tiled_loss",
        "tiles of a loss that is fused, and tiled by itself (fused_kernels.loss)",
        lambda c: c.fused_kernels.enabled and c.fused_kernels.loss and c.sequence_parallel.tiled_loss is not None,
        conditional=True,
    ),
    Feature(
        "tensor_parallel.keep_module_on_host",
        "split layers in host memory",
        lambda c: c.tensor_parallel.keep_module_on_host,
    ),
    Feature(
        "tensor_parallel.vocab_parallel_ce_backend",
        "Liger's cross-entropy over a split vocabulary",
        lambda c: c.tensor_parallel.vocab_parallel_ce_backend == "liger",
        instead='use "torch"',
    ),
    Feature(
        "tensor_parallel.injection_policy_tuple",
        "manual injection policies",
        lambda c: c.tensor_parallel.injection_policy_tuple is not None,
    ),
    Feature("expert_parallel.comm_backend", "DeepEP", functools.partial(_given, "comm_backend")),
    Feature(
        "expert_parallel",
        "spread experts together with divided sequences (tensor_parallel.sequence_parallel)",
        lambda c: c.expert_parallel.enabled and c.axis_sizes["tp"] > 1 and c.tensor_parallel.sequence_parallel,
        conditional=True,
    ),
    *(
        Feature(
            f"expert_parallel.{key}",
            "a router, or experts, other than the model's own (set it in the model's config)",
            functools.partial(_given, key),
        )
        for key in (
            *("top_k", "score_func", "score_apply", "route_norm", "route_scale", "routed_scaling_factor"),
            *("num_expert_groups", "num_limited_groups", "expert_activation"),
            "load_balance_coeff",
        )
    ),
    Feature("compile.deepcompile", "DeepCompile", lambda c: c.compile.deepcompile),
    Feature("hybrid_engine", "the hybrid engine", lambda c: c.hybrid_engine.enabled),
    Feature(
        "weight_quantization",
        "weight quantisation",
        lambda c: bool(c.weight_quantization.quantized_initialization or c.weight_quantization.post_init_quant),
    ),
    Feature("autotuning", "the autotuner", lambda c: c.autotuning.enabled),
    Feature("compression_training", "compression", lambda c: _switched_on(c.compression_training)),
    Feature("eigenvalue", "eigenvalue", lambda c: c.eigenvalue.enabled),
    Feature("quantize_training", "MoQ", lambda c: c.quantize_training.enabled),
    Feature("progressive_layer_drop", "progressive layer drop", lambda c: c.progressive_layer_drop.enabled),
    Feature("curriculum_learning", "curriculum learning", lambda c: c.curriculum_learning.enabled),
    Feature("data_efficiency", "data efficiency", data_techniques),
    Feature("sparse_attention", "sparse attention", lambda c: c.sparse_attention is not None),
    Feature("amp", "Apex AMP (use bf16, fp16 or torch_autocast)", lambda c: c.amp.enabled),
    Feature("nebula", "Nebula checkpoints", lambda c: c.nebula.enabled),
    Feature("datastates_ckpt", "DataStates checkpoints", lambda c: c.datastates_ckpt is not None),
    Feature("graph_harvesting", "graph harvesting", lambda c: c.graph_harvesting),
    Feature(
        "optimizer.type",
        "1-bit optimizers",
        lambda c: c.optimizer.type in ONE_BIT_OPTIMIZERS,
        instead="use AdamW in place of OneBitAdam and ZeroOneAdam, Lamb in place of OneBitLamb, and remove the params "
        "that only those have, such as freeze_step",
    ),
)


def unbuilt(schema: Schema, features: tuple[Feature, ...] = UNBUILT) -> list[Problem]:
    """What this config asks for and this version does not have."""
    return [feature.problem for feature in features if feature.asked(schema)]


def missing_first(problems: list[Problem], data: Mapping[str, Any]) -> list[Problem]:
    """The problems of a config that is not valid: what no correction would make work goes before everything else.

    What is wrong inside of a section of a missing feature is left out.
    """
    missing = [each for each in UNBUILT if not each.conditional and _turned_on(data, each.path)]
    inside = tuple(f"{each.path}{mark}" for each in missing for mark in ".:,")
    return [*(each.problem for each in missing), *(each for each in problems if not str(each).startswith(inside))]


def _turned_on(data: Mapping[str, Any], path: str) -> bool:
    """Whether a config that may not be valid asks for what is at `path`, as far as that can be seen."""
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return value.lower() in {name.lower() for name in ONE_BIT_OPTIMIZERS}
    return value is True or (isinstance(value, Mapping) and _has_switch_on(value))


def _has_switch_on(section: Mapping[str, Any]) -> bool:
    inner = (value for value in section.values() if isinstance(value, Mapping))
    return section.get("enabled") is True or any(map(_has_switch_on, inner))


def require(schema: Schema, features: tuple[Feature, ...] = UNBUILT) -> None:
    """Raise one FeatureUnavailable for all of them."""
    missing = unbuilt(schema, features)
    if missing:
        raise FeatureUnavailable("\n".join(map(str, missing)), path=missing[0].path)
