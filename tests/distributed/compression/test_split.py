"""Compressed layers that tensor-parallel ranks share compute what whole ones do."""

from __future__ import annotations

import pytest
import torch

import deepspeed
from tests.clients import tiny
from tests.distributed.compression.test_training import technique
from tests.harness import shared_ranks

SCORED = {
    "sparse_pruning": technique(["gate_proj", "down_proj"], {"dense_ratio": 0.5}, method="topk", schedule_offset=0),
    "row_pruning": technique(["up_proj"], {"dense_ratio": 0.5}, method="topk", schedule_offset=0),
    "head_pruning": technique(["o_proj"], {"dense_ratio": 0.5}, method="topk", schedule_offset=0, num_heads=4),
}
BLOCKS = {
    "sparse_pruning": {
        "shared_parameters": {
            "enabled": True,
            "method": "snip_momentum",
            "schedule_offset": 1,
            "schedule_offset_end": 2,
            "block_pattern": "1x4",
            "dense_ratio": 0.4,
        }
    },
}


def trained(section, **split):
    """Losses of a training, and the masks that it ended with."""
    tokens = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **split}
    engine = deepspeed.initialize(model=tiny.llama(), config={**config, "compression_training": section})[0]
    losses = []
    for _ in range(4):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    held = {name: value.detach().clone() for name, value in engine.module.state_dict().items() if "_mask" in name}
    engine.destroy()
    return losses, held


@shared_ranks(2)
def test_what_gradients_choose_is_what_they_choose_of_whole_layers():
    for section in (SCORED, BLOCKS):
        (losses, held), (expected, wanted) = trained(section, tensor_parallel={"autotp_size": 2}), trained(section)
        assert losses == pytest.approx(expected, rel=1e-4)
        for name, value in wanted.items():
            if value.dtype is not torch.int32:  # bits of scores
                torch.testing.assert_close(held[name], value, rtol=1e-3, atol=1e-4)


@shared_ranks(2)
def test_layers_that_ranks_share_compute_what_whole_ones_do():
    bits = {"start_bits": 6, "target_bits": 6}
    section = {
        "weight_quantization": technique(["mlp", "self_attn"], bits, quantize_groups=2, schedule_offset=0),
        "activation_quantization": technique(["mlp", "self_attn"], {"bits": 8}, schedule_offset=0),
        "row_pruning": technique(["gate_proj"], {"dense_ratio": 0.5}, schedule_offset=0),
    }
    found = [trained(section, **split)[0] for split in ({}, {"tensor_parallel": {"autotp_size": 2}})]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
