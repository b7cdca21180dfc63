"""Engines that stop and go on: bit for bit as if they had not stopped, at every stage and in every precision."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.harness import shared_ranks
from tests.models import Tiny, batches, make, share

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")


class Mixed(Tiny):
    """With a frozen layer, a layer that is never used, running statistics, dropout and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.extra.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("kept", torch.arange(3))
        self.seen = 0

    def forward(self, tokens, labels):
        self.seen += 1
        hidden = self.embedding(tokens)
        hidden = self.bn(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = nn.functional.dropout(hidden, 0.1)
        hidden = hidden + self.extra(hidden) + self.down(torch.relu(self.norm(self.up(hidden))))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def groups(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0},
    ]


def build(stage, precision="fp32", model=None, *, params=groups, data=None, zero=None, samples=12, **config):
    model = make(Mixed) if model is None else model
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        section["fp16"].update(initial_scale_power=8, loss_scale_window=2)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if params is None else params(model),
        training_data=data,
        config={
            "train_batch_size": samples,
            "train_micro_batch_size_per_gpu": samples // dist.get_world_size(),
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10, **(zero or {})},
            **section,
            **config,
        },
    )
    return engine


def train(engine, first, last, samples=12):
    """Losses of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for batch in batches(last, samples)[first:]:
        loss = engine(*share(batch, rank, world))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine):
    """All that training depends on, whole, by name."""
    state = engine.module_state_dict()
    found = {name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"master:{name}"] = safe_get_full_fp32_param(param)
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                value = safe_get_full_optimizer_state(param, kind)
                found[f"{kind}:{name}"] = value
    found["counters"] = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps
    found["scale"] = engine._parts.scale.state_dict()
    found["lr"] = engine.get_lr()
    return found


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("form", ["deepspeed", "safetensors"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(1, 2)
def test_a_resumed_run_is_the_same_run(stage, precision, form, tmp_path):
    options = {"checkpoint": {"format": form}}
    engine = build(stage, precision, **options)
    torch.manual_seed(dist.get_rank())
    train(engine, 0, 3)
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "global_steps": 99})
    losses, drawn = train(engine, 3, 6), random.random()
    end = everything(engine)
    engine.destroy()

    random.seed(5)
    engine = build(stage, precision, make(Mixed, seed=7), **options)
    path, client = engine.load_checkpoint(tmp_path)
    assert "global_step3" in path
    assert client["epoch"] == 3
    assert client["global_steps"] == 99
    assert client["ds_config"]["gradient_clipping"] == 1.0
    assert engine.global_steps == 3
    assert engine.module.seen == 3
    assert train(engine, 3, 6) == losses
    assert_equal(everything(engine), end)
    dist.barrier()
    random.seed(5)
    engine.load_checkpoint(tmp_path)  # in place, into an engine that has stepped
    assert train(engine, 3, 6) == losses
    assert random.random() == drawn
    assert_equal(everything(engine), end)
