"""In what the optimizer's moments are held: as the config says, whoever made the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tests.harness import shared_ranks, store_path

NARROW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
OPTIMIZERS = {"ours": FusedAdam, "host": DeepSpeedCPUAdam, "torch": torch.optim.AdamW, "config": None}


def engine_of(kind, stage, bf16, model=None, optimizer=None):
    model = nn.Linear(4, 4) if model is None else model
    make = OPTIMIZERS[kind]
    section = {"optimizer": {"type": "AdamW"}} if make is None else {}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True, **bf16},
        **section,
    }
    optimizer = optimizer or (None if make is None else make(model.parameters()))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine, steps=1):
    for _ in range(steps):
        x = torch.ones(2, 4, dtype=torch.bfloat16)
        engine.backward(engine(x).sum())
        engine.step()


def held(engine):
    states = engine.basic_optimizer.state.values()
    return {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("stage", [1, 3])
@shared_ranks(1, 2)
def test_moments_are_held_as_the_config_says(kind, stage):
    for bf16, dtype in (({}, torch.float32), (NARROW, torch.bfloat16)):
        engine = engine_of(kind, stage, bf16)
        train(engine)
        assert held(engine) == {dtype}
        engine.save_checkpoint(store_path(), tag="moments")
        engine.destroy()
        again = engine_of(kind, stage, bf16)
        again.load_checkpoint(store_path(), tag="moments")
        assert held(again) == {dtype}
        again.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@shared_ranks(1, 2)
def test_moments_that_an_optimizer_brings_are_widened(stage):
    model = nn.Linear(4, 4).bfloat16()
    optimizer = FusedAdam(model.parameters())
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    model.zero_grad()
    engine = engine_of("ours", stage, {}, model, optimizer)
    train(engine)
    assert held(engine) == {torch.float32}
    assert {state["step"] for state in optimizer.state.values()} == {2}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@shared_ranks(1)
def test_narrow_masters_with_wide_moments_are_refused(precision):
    key = f"{precision}_master_weights_and_grads"
    with pytest.raises(DeepSpeedConfigError, match=rf"{precision}\.{key}"):
        deepspeed.initialize(
            model=nn.Linear(2, 2),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "AdamW"},
                precision: {"enabled": True, key: True},
            },
        )
