"""`Rule`: how weights whose names match are split: the user's rules, presets, names of layers, the model's own plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import nn

from deepspeed.config.parallel import LayerSpecConfig
from deepspeed.errors import UsageError


class SplitKind(Enum):
    """What becomes of a layer."""

    COLUMN = "column"
    """Its output is split: rows of a Linear's weight."""
    ROW = "row"
    """Its input is split: columns of a Linear's weight; the outputs of all ranks are summed."""
    WHOLE = "skip"
    """Every rank has all of it and computes the same."""
    WHOLE_INSIDE = "skip, gradients summed"
    """Every rank has all of it and applies it to its own heads, so that gradients are summed."""
    HEADS = "heads"
    """Something of an attention module that has a row for each head; each rank has those of its heads."""
    WHOLE_AND_INTO_HEADS = "skip, some outputs go to heads"
    """Every rank has all of it; its last outputs go to this rank's heads, so that their gradients are summed."""
    VOCABULARY = "vocabulary"
    """An embedding or output layer, split by tokens."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; `pattern` is matched from the start of `<module>.weight`."""

    pattern: re.Pattern[str]
    kind: SplitKind
    parts: int | tuple[int, ...] = 1
    """Equal parts, or the sizes of unequal ones, that are fused in the split dim."""
    gather_output: bool = False
    """The output of a column layer is gathered whole."""
    split_input: bool = False
    """The input of a row layer is whole, and each rank takes its share of it."""
    model_types: tuple[str, ...] | None = None
    source: str = "the config"
    """Where the rule comes from, for messages."""
    known: bool = False
    """The layer is one of a family whose parts fit together also where they are unequal."""

    def matches(self, name: str, model_type: str | None) -> bool:
        """Whether it is about the module of this path."""
        if self.model_types is not None and (model_type or "").lower() not in self.model_types:
            return False
        return self.pattern.match(f"{name}.weight") is not None


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in order of precedence; the first that matches wins."""

    rules: tuple[Rule, ...]
    strict: bool = False
    """A layer that no rule matches is an error."""
    heads: Sequence[str] = ("lm_head", "embed_out")
    """Last parts of the path of the output layer."""

    def find(self, name: str, model_type: str | None) -> Rule | None:
        return next((rule for rule in self.rules if rule.matches(name, model_type)), None)


def plain_path(path: str) -> str:
    """A path without what adapter libraries put around a model and its layers."""
    return path.removesuffix(".base_layer").removeprefix("base_model.model.")


def of_spec(spec: LayerSpecConfig, source: str) -> list[Rule]:
    """A rule of the config's `layer_specs`, one for each of its patterns."""
    kind = SplitKind(spec.partition_type)
    if kind is SplitKind.WHOLE and spec.grad_allreduce:
        kind = SplitKind.WHOLE_INSIDE
    parts: int | tuple[int, ...] = 1
    if spec.shape is not None and kind in (SplitKind.COLUMN, SplitKind.ROW):
        dim = spec.partition_dim if spec.partition_dim is not None else (1 if kind is SplitKind.ROW else 0)
        at = spec.shape[dim]
        parts = tuple(at) if isinstance(at, list) else max(at, 1)
    types = None if spec.model_types is None else tuple(name.lower() for name in spec.model_types)
    return [
        Rule(re.compile(pattern), kind, parts, spec.gather_output, model_types=types, source=source)
        for pattern in spec.patterns
    ]


_ATTENTION = (("column", r"self_attn\.[qkv]_proj"), ("row", r"self_attn\.o_proj"))
_GATED = (("column", r"mlp\.(up|gate)_proj"), ("row", r"mlp\.down_proj"))
_BLOOM = (
    ("column", r"self_attention\.query_key_value"),
    ("row", r"self_attention\.dense"),
    ("column", r"mlp\.dense_h_to_4h"),
    ("row", r"mlp\.dense_4h_to_h"),
)
_PRESETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama": (*_ATTENTION, *_GATED),
    "qwen2": (*_ATTENTION, *_GATED),
    "bloom": _BLOOM,
    "chatglm": (("column", r"self_attention\.query_key_value", "3"), ("column", r"mlp\.dense_h_to_4h", "2"), *_BLOOM),
    "mixtral": (
        *_ATTENTION,
        ("column", r"block_sparse_moe\.experts\.\d+\.w[13]"),
        ("row", r"block_sparse_moe\.experts\.\d+\.w2"),
        ("skip", r"block_sparse_moe\.gate"),
    ),
    "deepseek_v2": (
        ("skip", r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)"),
        ("column", r"self_attn\.(q|q_b|kv_b)_proj"),
        ("row", r"self_attn\.o_proj"),
        ("skip", r"mlp\.gate"),
        ("column", r"mlp\.((shared_experts|experts\.\d+)\.)?(up|gate)_proj"),
        ("row", r"mlp\.((shared_experts|experts\.\d+)\.)?down_proj"),
    ),
    "phi3": (
        ("column", r"self_attn\.qkv_proj", "3"),
        ("row", r"self_attn\.o_proj"),
        ("column", r"mlp\.gate_up_proj", "2"),
        ("row", r"mlp\.down_proj"),
    ),
}

# Last parts of paths. Attention and feed-forward layers of the models that have no plan of their own.
_NAMES = (
    ("column", r"(q_proj|k_proj|v_proj|query|key|value|q_lin|k_lin|v_lin|query_key_value|c_attn|qkv_proj|Wqkv)"),
    ("column", r"(SelfAttention|EncDecAttention)\.[qkv]"),
    ("row", r"(SelfAttention|EncDecAttention)\.o"),
    ("column", r"DenseReluDense\.(wi|wi_0|wi_1)"),
    ("row", r"DenseReluDense\.wo"),
    ("row", r"(o_proj|out_proj|out_lin|Wo)"),
    ("row", r"(self_attention|self_attn|attention|attn|attention\.output)\.(dense|c_proj|proj)"),
    ("column", r"(gate_proj|up_proj|gate_up_proj|dense_h_to_4h|fc1|fc_in|c_fc|lin1|intermediate\.dense)"),
    ("row", r"(down_proj|dense_4h_to_h|fc2|fc_out|lin2|mlp\.c_proj)"),
    ("row", r"layer\.\d+\.output\.dense"),
)
_CTRL = (
    ("column", r"multi_head_attention\.W[qkv]"),
    ("row", r"multi_head_attention\.dense"),
    ("column", r"ffn\.0"),
    ("row", r"ffn\.2"),
)
_FUSED = {"c_attn": 3, "qkv_proj": 3, "Wqkv": 3, "gate_up_proj": 2, "Wi": 2}
"""Last parts of paths whose output is that many parts side by side."""


def preset(name: str) -> list[Rule]:
    """The rules of a family of the config's `preset_model`."""
    return [_rule(row, f"the preset {name!r}") for row in _PRESETS[name]]


def by_names() -> list[Rule]:
    """Rules for the usual names of layers inside a list of blocks."""
    fused = [
        Rule(
            re.compile(rf"(.*\.)?\d+\.(.*\.)?{leaf}\.weight$"), SplitKind.COLUMN, parts, source="the names", known=True
        )
        for leaf, parts in _FUSED.items()
    ]
    rows = [(kind, rf"\d+\.(?:.*\.)?{pattern}") for kind, pattern in _NAMES[:-1]]
    named = [_rule(row, "the names of its layers") for row in (*rows, _NAMES[-1])]
    ctrl = [replace(_rule(row, "the names of its layers"), model_types=("ctrl",)) for row in _CTRL]
    return [*ctrl, *fused, *named]


def _rule(row: tuple[str, ...], source: str) -> Rule:
    kind, pattern, *parts = row
    compiled = re.compile(rf"(?:.*\.)?{pattern}\.weight$")
    return Rule(compiled, SplitKind(kind), int(parts[0]) if parts else 1, source=source, known=True)


_SOURCE = "the model's own tp_plan"
_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"kind": SplitKind.COLUMN},
    "rowwise": {"kind": SplitKind.ROW},
    "colwise_gather_output": {"kind": SplitKind.COLUMN, "gather_output": True},
    "colwise_rep": {"kind": SplitKind.COLUMN, "gather_output": True},
    "rowwise_split_input": {"kind": SplitKind.ROW, "split_input": True},
    "rowwise_rep": {"kind": SplitKind.ROW, "split_input": True},
    "embedding_rowwise": {"kind": SplitKind.VOCABULARY},
    "replicate": {"kind": SplitKind.WHOLE},
    "mla_kv_a_proj": {"kind": SplitKind.WHOLE},  # what becomes of its outputs follows from its attention
    "replicated_with_grad_allreduce": {"kind": SplitKind.WHOLE_INSIDE},
    "packed_colwise": {"kind": SplitKind.COLUMN, "parts": 2},
    "packed_rowwise": {"kind": SplitKind.ROW, "parts": 2},
    "moe_tp_experts": {"kind": SplitKind.COLUMN},
}
_BETTER = {"qkv_proj": 3, "gate_up_proj": 2}
"""Fused layers that plans gather, because their parts are side by side; they are cut part by part instead."""


def model_plan(model: nn.Module) -> dict[str, str]:
    """The plans of all modules that have one, by path pattern with `*` for a number; empty if there is none."""
    plan: dict[str, str] = {}
    paths = {path for path, _ in model.named_modules()}
    for prefix, module in model.named_modules():
        base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        # A wrapper may answer for the model inside of it: only the module's own plans count.
        for own in (getattr(type(module), "_tp_plan", None), vars(module).get("_tp_plan")):
            if isinstance(own, Mapping):
                plan.update({_under(prefix, path): style for path, style in own.items()})
        if isinstance(base, Mapping):
            for where in _bases(module, prefix, base, paths):
                plan.update({_under(where, path): style for path, style in base.items()})
    return plan


def _bases(module: nn.Module, prefix: str, plan: Mapping[str, str], paths: Collection[str]) -> Iterator[str]:
    """The paths of the modules that the plan of a config is about: a base model, or what fits in any other model."""
    if hasattr(module, "base_model"):
        yield from [prefix] if module.base_model is module else []
    elif not prefix:
        firsts = {path.partition(".*")[0] for path in plan}
        yield from (path for path in paths if any((f"{path}.{first}" if path else first) in paths for first in firsts))


def of_plan(plan: Mapping[str, str]) -> list[Rule]:
    """A rule for each row of a plan."""
    found = []
    for path, style in plan.items():
        if style not in _STYLES:
            raise UsageError(
                f"tensor_parallel: the model's own plan splits {path} by {style!r}, which is not known here (known: "
                f"{', '.join(_STYLES)}). Give tensor_parallel.partition_config with rules for this model"
            )
        options = dict(_STYLES[style])
        leaf = path.rsplit(".", 1)[-1]
        if leaf in _BETTER and options["kind"] is SplitKind.COLUMN:
            options = {"kind": SplitKind.COLUMN, "parts": _BETTER[leaf]}
        elif options.get("split_input") and _fused_before(path, plan):
            options = {"kind": SplitKind.ROW}
        pattern = re.escape(path).replace(r"\*", r"\d+")
        found.append(Rule(re.compile(rf"{pattern}\.weight$"), **options, source=_SOURCE, known=True))
    return found


def _fused_before(path: str, plan: Mapping[str, str]) -> bool:
    """Whether a row layer follows a fused layer that is cut part by part, so that its input is split already."""
    parent = path.rsplit(".", 1)[0]
    return any(f"{parent}.{leaf}" in plan for leaf in _BETTER)


def _under(prefix: str, path: str) -> str:
    return plain_path(f"{prefix}.{path}" if prefix else path)
