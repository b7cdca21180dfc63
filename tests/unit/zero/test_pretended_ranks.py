"""Rank 0 of thousands in one process, on torch's fake process group: every stage plans and trains without a patch."""

from __future__ import annotations

import cProfile
import functools
import pstats

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import deepspeed
from tests.harness import ranks


@pytest.mark.parametrize(
    ("stage", "world", "store"),
    [
        *((0, 8, True), (1, 8, False), (1, 16384, True), (2, 1024, True), (3, 8, True), (3, 64, False)),
        pytest.param(3, 16384, True, marks=pytest.mark.slow),
    ],
)
@ranks(1, init=False)
def test_every_stage_trains(stage, world, store):
    options = {"store": FakeStore()} if store else {}
    dist.init_process_group("fake", rank=0, world_size=world, **options)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(4)])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(6):
        engine.backward(engine(torch.randn(2, 16)).square().mean())
        engine.step()
    assert engine.global_steps == 3


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        ("AdamW", {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}),
        ("AdamW", {"stage": 2, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 4}}),
        ("AdamW", {"stage": 3, "mics_shard_size": 8}),
        ("OneBitAdam", {"stage": 2}),
    ],
)
@ranks(1, init=False)
def test_codecs_plan_and_train(kind, zero, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    dist.init_process_group("fake", rank=0, world_size=128, store=FakeStore())
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": {"lr": 1e-3, **({"freeze_step": 1} if kind == "OneBitAdam" else {})}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()
    assert engine.global_steps == 3


def calls_of_a_step(layers, stage, threshold, **zero):
    """Of functions, of Python and of C, with `layers` tiny layers, once plans are made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList(nn.Linear(16, 16) for _ in range(layers)))
    model.forward = lambda inputs: functools.reduce(lambda x, layer: layer(x), model[0], inputs)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold, **zero},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    profile = cProfile.Profile()
    for number in range(6):
        if number == 5:
            profile.enable()
        engine.backward(engine(torch.randn(2, 16)).square().mean())
        engine.step()
    profile.disable()
    engine.destroy()
    return pstats.Stats(profile).total_calls


@pytest.mark.parametrize(
    ("stage", "threshold", "most"), [(3, 0, 160), (3, 10**5, 75), (2, 0, 65)], ids=["gathered", "persistent", "stage 2"]
)
@ranks(1, init=False)
def test_a_layer_costs_the_host_few_calls(stage, threshold, most):
    """A layer of two parameters, of which plain PyTorch makes 30 calls with an optimizer of its own."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    few, many = (calls_of_a_step(layers, stage, threshold) for layers in (8, 24))
    assert (many - few) / 16 <= most


@ranks(1, init=False)
def test_codes_of_gradients_cost_the_host_as_much_on_any_number_of_ranks(monkeypatch):
    """Apart from the codecs: a kernel takes the codes of all ranks, and the reference those of one after the other."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("deepspeed.ops.codecs.rows.encode", lambda *_: None)
    monkeypatch.setattr("deepspeed.ops.codecs.rows.decode_sum", lambda *_: None)
    found = []
    for world in (8, 2048):
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        found.append(calls_of_a_step(4, 3, 0, zero_quantized_gradients=True))
        dist.destroy_process_group()
    assert found[1] <= 1.1 * found[0]
