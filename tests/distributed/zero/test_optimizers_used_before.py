"""Optimizers that know their parameters before an engine has them: states of other shapes and dtypes come along."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.utils import safe_get_full_fp32_param
from tests.harness import shared_ranks

KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "FusedAdam, 8 bits": lambda params: FusedAdam(params, lr=0.01, moment_bits=8),
    "FusedLion, 16 bits": lambda params: FusedLion(params, lr=0.001, moment_bits=16),
}


class Model(nn.Module):
    """A scalar, and a vector of more elements than have one scale in 8 bits."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 50)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.vector = nn.Parameter(torch.linspace(-1, 1, 1200))

    def forward(self, x):
        return self.layer(x) * self.factor + self.vector.square().sum() * 0.01


def batch(step, dtype):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def plain(model, optimizer, steps, dtype):
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, dtype)).float().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def trained(kind, stage, dtype):
    """(masters of an engine that goes on with a used optimizer; the optimizer; parameters of one that goes on alone)"""
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = KINDS[kind](model.parameters())
    plain(model, optimizer, range(2), dtype)
    alone = copy.deepcopy(model)
    other = KINDS[kind](alone.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain(alone, other, range(2, 5), dtype)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2, 5):
        engine.backward(engine(batch(step, dtype)).float().square().mean())
        engine.step()
    masters = [safe_get_full_fp32_param(param).detach().clone() for param in model.parameters()]
    return masters, optimizer, [param.detach() for param in alone.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 3])
@shared_ranks(2)
def test_states_are_cut_as_parameters_are(kind, stage):
    mine, _, theirs = trained(kind, stage, torch.float32)
    close = 5e-3 if "8 bits" in kind else 1e-6  # codes are rounded by the place of an element in its part
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=close, atol=close)


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@shared_ranks(2)
def test_states_are_as_wide_as_masters(kind, stage):
    mine, optimizer, theirs = trained(kind, stage, torch.bfloat16)
    shaped = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {value.dtype for value in shaped} == {torch.float32}
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@shared_ranks(1)
def test_adagrad_of_the_config_sums_in_float32(stage, precision):
    """torch makes the sums when it makes the optimizer, of parameters that are cast already."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adagrad"},
        "zero_optimization": {"stage": stage},
        precision: {"enabled": True},
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    states = engine.basic_optimizer.state
    assert {state["sum"].dtype for state in states.values()} == {torch.float32}
