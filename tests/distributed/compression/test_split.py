"""Compressed layers that tensor-parallel ranks share compute what whole ones do."""

from __future__ import annotations

import pytest
import torch

import deepspeed
from tests.clients import tiny
from tests.distributed.compression.test_training import technique
from tests.harness import ranks


@ranks(2)
def test_layers_that_ranks_share_compute_what_whole_ones_do():
    tokens = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(0))
    bits = {"start_bits": 6, "target_bits": 6}
    section = {
        "weight_quantization": technique(["mlp", "self_attn"], bits, quantize_groups=2, schedule_offset=0),
        "activation_quantization": technique(["mlp", "self_attn"], {"bits": 8}, schedule_offset=0),
        "row_pruning": technique(["gate_proj"], {"dense_ratio": 0.5}, schedule_offset=0),
    }
    found = []
    for split in ({}, {"tensor_parallel": {"autotp_size": 2}}):
        torch.manual_seed(0)
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **split}
        engine = deepspeed.initialize(model=tiny.llama(), config={**config, "compression_training": section})[0]
        for _ in range(3):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
    assert found[:3] == pytest.approx(found[3:], rel=1e-4)
