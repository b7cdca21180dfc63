"""What is whole at stage 3, and when."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.harness import shared_ranks

WIDTH, LAYERS = 16, 6


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self.seen = []

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.seen.append(live(self))
        return x.square().mean()


def live(module):
    """Elements of memory that belong to whole parameters, used or on their way."""
    return sum(p._zero.flat.untyped_storage().size() // p.element_size() for p in module.parameters())


def build(**zero):
    torch.manual_seed(0)
    return deepspeed.initialize(
        model=Stack(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        },
    )[0]


@shared_ranks(2)
def test_nothing_is_whole_between_forward_and_backward():
    engine = build()
    for _ in range(3):
        loss = engine(torch.randn(2, WIDTH))
        assert live(engine.module) == 0
        engine.backward(loss)
        assert live(engine.module) == 0
        engine.step()
        assert live(engine.module) == 0


@pytest.mark.parametrize("layers", [1, 2, 4])
@shared_ranks(2)
def test_no_more_than_the_budget_is_whole(layers):
    size = WIDTH * WIDTH
    engine = build(stage3_max_live_parameters=layers * size, stage3_prefetch_bucket_size=10 * size)
    peaks = []
    for layer in engine.module.layers:
        layer.weight.register_post_accumulate_grad_hook(lambda _: peaks.append(live(engine.module)))
    for _ in range(4):
        engine.backward(engine(torch.randn(2, WIDTH)))
        engine.step()
    assert max(engine.module.seen) <= layers * size
    assert max(peaks) <= layers * size
    assert max(engine.module.seen[-LAYERS:]) == (layers - 1) * size, "all but the layer that was just released"


@shared_ranks(2)
def test_gathers_ahead_are_few_and_large():
    engine = build(stage3_prefetch_bucket_size=3 * WIDTH * WIDTH)
    coordinator = engine._parts.sharded.coordinator
    counts = []
    for _ in range(3):
        before = coordinator.schedule.gathers
        engine.backward(engine(torch.randn(2, WIDTH)))
        counts.append(coordinator.schedule.gathers - before)
        engine.step()
    assert counts == [2 * LAYERS] * 3, "each layer once in forward and once in backward"


@shared_ranks(2)
def test_reuse_distance_keeps_parameters_for_backward():
    engine = build(stage3_max_reuse_distance=10**9)
    coordinator = engine._parts.sharded.coordinator
    for _ in range(2):
        engine.backward(engine(torch.randn(2, WIDTH)))
        engine.step()
    before = coordinator.schedule.gathers
    loss = engine(torch.randn(2, WIDTH))
    assert live(engine.module) == LAYERS * WIDTH * WIDTH
    engine.backward(loss)
    assert coordinator.schedule.gathers - before == LAYERS, "gathered once for both passes"
    assert live(engine.module) == 0
    engine.step()
    assert dist.is_initialized()
