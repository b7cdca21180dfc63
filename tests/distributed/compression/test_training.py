"""Compressed layers under engines: every stage computes what one plain process does, MoQ resumes bit-equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compression.compress import init_compression
from deepspeed.compression.scheduler import compression_scheduler
from tests.harness import ranks, store_path
from tests.models import Tiny, batches, make, share

STEPS = 4


def technique(modules, params, **shared):
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, **shared},
        "different_groups": {"one": {"params": params, "modules": modules}},
    }


EVERYTHING = {
    "weight_quantization": technique(
        ["up", "down", "embedding"],
        {"start_bits": 8, "target_bits": 6, "quantization_period": 1},
        quantize_groups=1,
        quantize_weight_in_forward=True,
        quantization_type="asymmetric",
    ),
    "activation_quantization": technique(["down"], {"bits": 8}),
    "sparse_pruning": technique(["down"], {"dense_ratio": 0.5}, schedule_offset=2),
    "row_pruning": technique(["up"], {"dense_ratio": 0.5}),
}
BLOCKS = {
    "sparse_pruning": {
        "shared_parameters": {
            **{"enabled": True, "method": "snip_momentum", "schedule_offset": 1, "schedule_offset_end": 3},
            **{"block_pattern": "4x1", "dense_ratio": 0.3, "excluded_modules": ["head"]},
        }
    },
}
MOQ = {
    "enabled": True,
    "quantize_bits": {"start_bits": 8, "target_bits": 5},
    "quantize_schedule": {"quantize_period": 1},
    "quantize_algo": {"rounding": "stochastic"},
    "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3},
}


def plain(section):
    """The same training in one process, without an engine."""
    model = init_compression(make(Tiny), {"train_batch_size": 4, "compression_training": section})
    scheduler = compression_scheduler(model, section)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches(STEPS, 4):
        loss = model(*batch)
        losses.append(loss.item())
        loss.backward()
        scheduler.before_step()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, model


def build(stage, model=None, **config):
    config = {
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **config,
    }
    return deepspeed.initialize(model=make(Tiny) if model is None else model, config=config)[0]


def train(engine, first=0, stop=STEPS):
    losses = []
    for batch in batches(stop, 4)[first:]:
        loss = engine(*share(batch, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def weights(engine):
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


@ranks(2)
def test_every_stage_computes_what_one_process_does():
    expected, _ = plain(EVERYTHING)
    scored = {"sparse_pruning": technique(["down"], {"dense_ratio": 0.5}, method="topk", schedule_offset=0)}
    trained, scores = plain(scored)
    fewer, blocks = plain(BLOCKS)
    for stage in (0, 1, 2, 3):
        engine = build(stage, compression_training=BLOCKS)
        assert train(engine) == pytest.approx(fewer, rel=1e-5)
        assert torch.equal(weights(engine)["up.sparse_pruning_mask"], blocks.up.sparse_pruning_mask)
        engine.destroy()
        engine = build(stage, compression_training=EVERYTHING)
        assert train(engine) == pytest.approx(expected, rel=1e-5)
        engine.destroy()
        engine = build(stage, compression_training=scored)
        assert train(engine) == pytest.approx(trained, rel=1e-5)
        if stage == 2:
            found = weights(engine)["down.sparse_mask_scores"]
            torch.testing.assert_close(found, scores.down.sparse_mask_scores.detach())
        engine.destroy()


@ranks(2)
def test_blocks_go_on_where_a_checkpoint_left_off():
    folder = Path(store_path()).parent / "saved"
    for stage, precision in ((1, {"bf16": {"enabled": True}}), (3, {})):
        engine = build(stage, compression_training=BLOCKS, **precision)
        train(engine, 0, 2)
        engine.save_checkpoint(folder, tag=str(stage))
        rest = train(engine, 2, 4)
        assert engine.module.up.sparse_mask_scores.dtype is torch.int32
        again = build(stage, compression_training=BLOCKS, **precision)
        again.load_checkpoint(folder, tag=str(stage))
        assert train(again, 2, 4) == rest
        for one, other in zip(weights(again).values(), weights(engine).values(), strict=True):
            assert torch.equal(one, other)
        engine.destroy()
        again.destroy()


@ranks(2)
def test_moq_resumes_bit_equal():
    folder = Path(store_path()).parent / "saved"
    for stage, precision in ((0, {}), (2, {"bf16": {"enabled": True}}), (3, {})):
        engine = build(stage, quantize_training=MOQ, **precision)
        train(engine, 0, 3)
        engine.save_checkpoint(folder, tag=str(stage))
        rest = train(engine, 3, 6)
        again = build(stage, quantize_training=MOQ, **precision)
        again.load_checkpoint(folder, tag=str(stage))
        assert train(again, 3, 6) == rest
        for one, other in zip(weights(again).values(), weights(engine).values(), strict=True):
            assert torch.equal(one, other)
        engine.destroy()
        again.destroy()
