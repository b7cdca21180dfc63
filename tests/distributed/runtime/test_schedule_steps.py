"""What the engine hands to the learning-rate schedule after a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from tests.harness import shared_ranks

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


class CountsSamples:
    """As Megatron's schedule: its step must be told by how much."""

    def __init__(self):
        self.samples = 0

    def step(self, increment):
        self.samples += increment


def build(schedule):
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule(optimizer), config=CONFIG)
    return engine


def step(engine, **given):
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).sum() * 1e-3)
        engine.step(**given)


@shared_ranks(2)
def test_a_schedule_that_counts_samples():
    engine = build(lambda optimizer: CountsSamples())
    step(engine)
    assert engine.lr_scheduler.samples == 2 * 3 * 2
    step(engine, lr_kwargs={"increment": 1})
    assert engine.lr_scheduler.samples == 2 * 3 * 2 + 1


@shared_ranks(1)
def test_a_schedule_that_looks_at_a_metric():
    """The number of samples was its metric, so that the learning rate fell whatever the loss did."""
    engine = build(lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    before = engine.module.weight.detach().clone()
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau needs a metric.*lr_kwargs=\{'metrics': loss\}"):
        step(engine)
    assert torch.equal(engine.module.weight, before)
    engine = build(lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    for metric, rate in ((3.0, 1.0), (2.0, 1.0), (2.0, 0.1)):
        step(engine, lr_kwargs={"metrics": metric})
        assert engine.get_lr() == [pytest.approx(rate)]


@shared_ranks(1)
def test_arguments_that_the_schedule_does_not_take():
    """They were dropped, and the schedule went to the position that is the number of samples."""
    engine = build(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    with pytest.raises(TypeError, match="epok"):
        step(engine, lr_kwargs={"epok": 1})
    assert engine.get_lr() == [1.0]
