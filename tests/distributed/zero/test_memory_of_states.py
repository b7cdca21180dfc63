"""Bytes of model states on every rank, counted from live tensors, are those of the stage's formula."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.memory import Spread, Widths, model_states
from tests.harness import shared_ranks


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 23), nn.LayerNorm(23), nn.Linear(23, 5))


def storages(*tensors):
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    found.pop(0, None)
    return sum(found.values())


def counted(engine):
    """(parameters, masters and moments, gradients) in bytes on this rank."""
    params = list(engine.module.parameters())
    shards = [param._zero for param in params if hasattr(param, "_zero")]
    held = [shard.data for shard in shards] + [shard.flat for shard in shards]
    whole = [] if shards else params
    optimizer = engine.basic_optimizer
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for p in masters for v in optimizer.state[p].values() if isinstance(v, torch.Tensor) and v.dim()]
    return storages(*held, *whole), storages(*masters), storages(*states)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@shared_ranks(1, 2, 4)
def test_bytes_of_a_stage(stage, precision):
    world, rank = dist.get_world_size(), dist.get_rank()
    engine, *_ = deepspeed.initialize(
        model=model(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        },
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 31, dtype=dtype)).float().square().mean())
        engine.step()
    width = 2 if precision == "bf16" else 4
    # masters of fp32 parameters are the parameters themselves
    widths = Widths(param=width, grad=width, master=0 if precision == "fp32" else 4, optimizer=8)
    numels = [param.numel() for param in model().parameters()]
    expected = model_states([numels], Spread(stage, world, rank), widths=widths)
    params, masters, states = counted(engine)
    slack = 0
    assert abs(params - expected.params) <= slack * width
    assert abs(states - expected.optimizer) <= slack * 8
    if precision == "bf16":
        assert abs(masters - expected.masters) <= slack * 4
    assert all(param.grad is None for param in engine.module.parameters())
