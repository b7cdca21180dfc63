"""Sizes of shards, against what DeepSpeed 0.19.8 answers."""

from __future__ import annotations

import pytest

from deepspeed.tensor_parallel.linear_modules import AutoTPMeta, get_shard_size_list


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
    assert get_shard_size_list(total, ranks) == get_shard_size_list(total, ranks, AutoTPMeta())
