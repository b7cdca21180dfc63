"""Rules as objects of scripts, and sizes of shards, against what DeepSpeed 0.19.8 answers."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from deepspeed.module_inject.auto_tp import AutoTPConfig, PartitionType, TPLayerSpec
from deepspeed.module_inject.autotp_config import AutoTPPresets, merge_autotp_configs
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size, get_shard_size_list

from deepspeed.errors import UsageError

LLAMA = "model.layers.3."
BLOOM = "transformer.h.3."


@pytest.mark.parametrize(
    ("family", "name", "kind", "shape"),
    [
        ("llama", LLAMA + "self_attn.o_proj.weight", "ROW", None),
        ("llama", LLAMA + "self_attn.k_proj.weight", "COLUMN", None),
        ("qwen2", LLAMA + "mlp.down_proj.weight", "ROW", None),
        ("qwen2", LLAMA + "mlp.gate_proj.weight", "COLUMN", None),
        ("mixtral", LLAMA + "block_sparse_moe.experts.1.w2.weight", "ROW", None),
        ("mixtral", LLAMA + "block_sparse_moe.experts.1.w3.weight", "COLUMN", None),
        ("mixtral", LLAMA + "block_sparse_moe.gate.weight", "SKIP", None),
        ("bloom", BLOOM + "self_attention.query_key_value.weight", "COLUMN", None),
        ("bloom", BLOOM + "mlp.dense_4h_to_h.weight", "ROW", None),
        ("chatglm", BLOOM + "self_attention.query_key_value.weight", "COLUMN", (3, -1)),
        ("chatglm", BLOOM + "mlp.dense_h_to_4h.weight", "COLUMN", (2, -1)),
        ("phi3", LLAMA + "self_attn.qkv_proj.weight", "COLUMN", (3, -1)),
        ("phi3", LLAMA + "mlp.gate_up_proj.weight", "COLUMN", (2, -1)),
        ("deepseek_v2", LLAMA + "self_attn.kv_a_proj_with_mqa.weight", "SKIP", None),
        ("deepseek_v2", LLAMA + "self_attn.kv_b_proj.weight", "COLUMN", None),
        ("deepseek_v2", LLAMA + "mlp.shared_experts.down_proj.weight", "ROW", None),
    ],
)
def test_presets(family, name, kind, shape):
    spec = getattr(AutoTPPresets, family)().find_matching_spec(name)
    assert (spec.partition_type.name, spec.shape) == (kind, shape)
    assert AutoTPPresets.get_preset(family.upper()).find_matching_spec(name) == spec
    assert AutoTPPresets.get_preset(family).find_matching_spec("model.norm.weight") is None


def test_a_fused_llama():
    spec = AutoTPPresets.llama_gqa(8, 2, 4).find_matching_spec(LLAMA + "self_attn.qkv_proj.weight")
    assert spec.shape == ((32, 8, 8), -1)
    assert spec.has_unequal_sub_params()
    assert (spec.get_sub_param_sizes(), spec.get_num_sub_params(), spec.get_partition_dim()) == ((32, 8, 8), 3, 0)
    assert AutoTPPresets.get_preset("nobody") is None


def test_a_section_and_two_merged():
    section = {"layer_specs": [{"patterns": ["a"], "partition_type": "row", "model_types": ["Llama"]}], "tp_size": 2}
    made = AutoTPConfig.from_dict({**section, "strict_mode": True, "lm_head_patterns": ["x"]})
    assert made.layer_specs == [TPLayerSpec(["a"], PartitionType.ROW, model_types=["llama"])]
    assert made.find_matching_spec("a.weight", "LLAMA") is made.layer_specs[0]
    assert made.find_matching_spec("a.weight", "bloom") is None
    assert made.find_matching_spec("a.weight") is None
    merged = merge_autotp_configs(made, AutoTPConfig(layer_specs=[TPLayerSpec(["b"])]))
    assert [spec.patterns for spec in merged.layer_specs] == [["b"], ["a"]]
    assert (merged.tp_size, merged.strict_mode, merged.lm_head_patterns) == (2, False, ["lm_head", "embed_out"])
    assert TPLayerSpec(["a"]).get_num_sub_params() is None
    with pytest.raises(ValueError, match="does not index shape"):
        TPLayerSpec(["a"], shape=(2, -1), partition_dim=2)


def test_plans_of_transformers():
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.o": "rowwise", "lm_head": "colwise_gather_output"}
    found = TPPlanConverter.convert({**plan, "embed_tokens": "embedding_rowwise"})
    assert [(spec.partition_type.name, spec.gather_output) for spec in found] == [
        ("COLUMN", False),
        ("ROW", False),
        ("COLUMN", True),
    ]
    assert re.match(found[0].patterns[0], LLAMA + "self_attn.q_proj.weight")
    assert TPPlanConverter.convert({}) is None
    with pytest.raises(UsageError, match="'strange'"):
        TPPlanConverter.convert({"layers.*.q": "strange"})


@pytest.mark.parametrize(
    ("total", "ranks", "meta", "attention", "other"),
    [
        (64, 4, AutoTPMeta(), [16, 16, 16, 16], [16, 16, 16, 16]),
        (10, 4, AutoTPMeta(), [3, 3, 2, 2], [3, 3, 2, 2]),
        (64, 4, AutoTPMeta(num_kv_heads=2), [32, 32, 0, 0], [16, 16, 16, 16]),
        (60, 4, AutoTPMeta(num_kv_heads=6, num_attention_heads=12), [20, 20, 10, 10], [15, 15, 15, 15]),
        (64, 3, AutoTPMeta(tp_grain_size=8), [24, 24, 16], [24, 24, 16]),
        (64, 3, AutoTPMeta(num_kv_heads=4, num_attention_heads=8, n_embd=64), [32, 16, 16], [22, 21, 21]),
    ],
)
def test_sizes_of_shards(total, ranks, meta, attention, other):
    """The numbers are those of DeepSpeed 0.19.8."""
    assert get_shard_size_list(total, ranks, meta) == attention
    for name in ("lm_head", "mlp.up"):
        assert get_shard_size_list(total, ranks, meta, name) == other
    assert [get_shard_size(total, ranks, meta, rank=rank) for rank in range(ranks)] == attention


def test_what_a_model_tells():
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert AutoTPMeta.from_model_config(config, 4) == AutoTPMeta(2, 8, 64, 4)
    assert AutoTPMeta.from_model_config(SimpleNamespace()) == AutoTPMeta()
