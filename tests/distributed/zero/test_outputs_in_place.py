"""Outputs of modules that are written in place before backward, views among them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.harness import shared_ranks


class Written(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.mark = nn.Parameter(torch.ones(16))
        self.how = how

    def forward(self, rows):
        hidden = self.first(rows)
        if self.how == "index":
            hidden[0] = self.mark
        elif self.how == "activation":
            nn.functional.relu(hidden, inplace=True)
        elif self.how == "residual":
            hidden += 1.0
        return self.second(hidden).square().mean()


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)], ids=["flat", "view"])
@pytest.mark.parametrize("how", ["not", "index", "activation", "residual"])
@shared_ranks(2)
def test_gradients_are_those_of_plain_torch(how, shape):
    torch.manual_seed(0)
    model = Written(how)
    inputs = torch.randn(2, *shape)
    plain = [torch.autograd.grad(model(each), list(model.parameters()), allow_unused=True) for each in inputs]
    norm = torch.stack([((a + b) / 2).norm() for a, b in zip(*plain, strict=True) if a is not None]).norm()
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    for _ in range(3):  # traced, then by the plan
        engine.backward(engine(inputs[dist.get_rank()]))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
