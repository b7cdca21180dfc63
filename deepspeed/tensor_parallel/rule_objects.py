"""Rules for splitting layers as objects, as scripts of DeepSpeed build them; they are checked as the config's are."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from deepspeed.config.parallel import LayerSpecConfig, PartitionConfig
from deepspeed.log import warn_once
from deepspeed.tensor_parallel.hf_plan import of_plan
from deepspeed.tensor_parallel.presets import preset
from deepspeed.tensor_parallel.rules import Kind, Rule

__all__ = ["AutoTPConfig", "AutoTPPresets", "PartitionType", "TPLayerSpec", "TPPlanConverter", "merge_autotp_configs"]

Shape = tuple[int | tuple[int, ...], ...]


class PartitionType(Enum):
    """How a weight is split."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """One rule: which weights it matches, and how they are split."""

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: Shape | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        self._checked()

    def get_partition_dim(self) -> int:
        """The dim that is split: of the shape, or of the weight."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 1 if self.partition_type is PartitionType.ROW else 0

    def has_unequal_sub_params(self) -> bool:
        """Whether the weight is fused of parts of unequal sizes."""
        return self.shape is not None and isinstance(self.shape[self.get_partition_dim()], tuple)

    def get_sub_param_sizes(self) -> tuple[int, ...] | None:
        """The sizes of unequal parts; None where they are equal or there is one."""
        found = None if self.shape is None else self.shape[self.get_partition_dim()]
        return found if isinstance(found, tuple) else None

    def get_num_sub_params(self) -> int | None:
        """How many parts the weight is fused of; None where the rule does not tell."""
        found = None if self.shape is None else self.shape[self.get_partition_dim()]
        if isinstance(found, tuple):
            return len(found)
        return found if found is not None and found > 0 else None

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Whether it is about the weight of this name, in a model of this type."""
        types = None if self.model_types is None else [name.lower() for name in self.model_types]
        if types is not None and (model_type or "").lower() not in types:
            return False
        return any(re.match(pattern, param_name) for pattern in self.patterns)

    def _checked(self) -> LayerSpecConfig:
        """The same as the config reads it, which checks it."""
        return LayerSpecConfig(
            patterns=self.patterns,
            partition_type=self.partition_type.value,
            shape=None if self.shape is None else [list(s) if isinstance(s, tuple) else s for s in self.shape],
            partition_dim=self.partition_dim,
            model_types=self.model_types,
            gather_output=self.gather_output,
            grad_allreduce=self.grad_allreduce,
        )


@dataclass
class AutoTPConfig:
    """Rules in order of precedence."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """The first rule about a weight; that there are several is told once."""
        found = [spec for spec in self.layer_specs if spec.matches(param_name, model_type)]
        if len(found) > 1:
            warn_once(f"{len(found)} rules match {param_name}; the first one counts")
        return found[0] if found else None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> AutoTPConfig:
        """Of a `partition_config` section."""
        section = PartitionConfig(**config_dict)
        return cls(
            tp_size=section.tp_size,
            layer_specs=[_of_section(row) for row in section.layer_specs],
            embedding_partition_dim=section.embedding_partition_dim,
            lm_head_patterns=list(section.lm_head_patterns),
            use_default_specs=section.use_default_specs,
            strict_mode=section.strict_mode,
        )


def _preset(name: str) -> AutoTPConfig:
    return AutoTPConfig(layer_specs=[_of_rule(rule) for rule in preset(name)])


class AutoTPPresets:
    """The rules of families of models."""

    llama = staticmethod(partial(_preset, "llama"))
    bloom = staticmethod(partial(_preset, "bloom"))
    chatglm = staticmethod(partial(_preset, "chatglm"))
    mixtral = staticmethod(partial(_preset, "mixtral"))
    deepseek_v2 = staticmethod(partial(_preset, "deepseek_v2"))
    qwen2 = staticmethod(partial(_preset, "qwen2"))
    phi3 = staticmethod(partial(_preset, "phi3"))

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig | None:
        """By the name that `preset_model` takes; None for an unknown one."""
        try:
            return _preset(model_type.lower())
        except KeyError:
            return None

    @staticmethod
    def llama_gqa(num_heads: int, num_kv_heads: int, head_dim: int) -> AutoTPConfig:
        """Llama with queries, keys and values fused in one weight, of different sizes."""
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        fused = TPLayerSpec([r".*\.self_attn\.qkv_proj\.weight$"], shape=((queries, keys, keys), -1), partition_dim=0)
        return AutoTPConfig(layer_specs=[fused, *_preset("llama").layer_specs])


class TPPlanConverter:
    """Plans of Transformers models as rules."""

    @staticmethod
    def convert(hf_tp_plan: dict[str, str]) -> list[TPLayerSpec] | None:
        """A rule for each row but those of embeddings, which stay whole; None where there is none.

        A row of a kind that is not known is an error, since half of a pair of layers must not be split.
        """
        rules = [rule for rule in of_plan(hf_tp_plan) if rule.kind is not Kind.VOCABULARY]
        return [_of_rule(rule, before=".*") for rule in rules] or None


def _of_section(spec: LayerSpecConfig) -> TPLayerSpec:
    """A rule of the config's `layer_specs`."""
    shape = None if spec.shape is None else tuple(tuple(s) if isinstance(s, list) else s for s in spec.shape)
    return TPLayerSpec(
        patterns=list(spec.patterns),
        partition_type=PartitionType(spec.partition_type),
        shape=shape,
        partition_dim=spec.partition_dim,
        model_types=spec.model_types,
        gather_output=spec.gather_output,
        grad_allreduce=spec.grad_allreduce,
    )


def _of_rule(rule: Rule, before: str = "") -> TPLayerSpec:
    """A rule of a preset or of a plan, whose paths may begin with something else."""
    kinds = {Kind.COLUMN: PartitionType.COLUMN, Kind.ROW: PartitionType.ROW}
    dim = 1 if rule.kind is Kind.ROW else 0
    shape: Shape | None = None
    if rule.parts != 1:
        shape = (rule.parts, -1) if dim == 0 else (-1, rule.parts)
    return TPLayerSpec(
        patterns=[before + rule.pattern.pattern],
        partition_type=kinds.get(rule.kind, PartitionType.SKIP),
        shape=shape,
        partition_dim=None if shape is None else dim,
        gather_output=rule.gather_output,
        grad_allreduce=rule.kind is Kind.WHOLE_INSIDE,
    )


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """The rules of both, those of `override` first; the size is that of `base`, everything else as `override` says."""
    return AutoTPConfig(
        tp_size=base.tp_size,
        layer_specs=[*override.layer_specs, *base.layer_specs],
        embedding_partition_dim=override.embedding_partition_dim,
        lm_head_patterns=list(override.lm_head_patterns),
        use_default_specs=override.use_default_specs,
        strict_mode=override.strict_mode,
    )
