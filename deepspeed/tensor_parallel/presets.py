"""Rules of model families by the names of their layers: the presets of the config, and what names tell of any model."""

from __future__ import annotations

import re
from dataclasses import replace

from deepspeed.tensor_parallel.rules import Kind, Rule

__all__ = ["by_names", "preset"]

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
        Rule(re.compile(rf"(.*\.)?\d+\.(.*\.)?{leaf}\.weight$"), Kind.COLUMN, parts, source="the names", known=True)
        for leaf, parts in _FUSED.items()
    ]
    rows = [(kind, rf"\d+\.(?:.*\.)?{pattern}") for kind, pattern in _NAMES[:-1]]
    named = [_rule(row, "the names of its layers") for row in (*rows, _NAMES[-1])]
    ctrl = [replace(_rule(row, "the names of its layers"), model_types=("ctrl",)) for row in _CTRL]
    return [*ctrl, *fused, *named]


def _rule(row: tuple[str, ...], source: str) -> Rule:
    kind, pattern, *parts = row
    compiled = re.compile(rf"(?:.*\.)?{pattern}\.weight$")
    return Rule(compiled, Kind(kind), int(parts[0]) if parts else 1, source=source, known=True)
