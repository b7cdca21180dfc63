"""Optimizers and parameter groups over shards: as at stage 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.closeness import assert_same_training
from tests.harness import shared_ranks
from tests.user_models import WIDTH, Tied, run


def two_groups(model):
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights, "weight_decay": 0.3, "lr": 2e-2}, {"params": rest, "weight_decay": 0.0}]


class Averaging(torch.optim.Optimizer):
    """As schedule-free optimizers: state of its own kinds, a counter in the group, no fused kernels."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state.setdefault("z", param.clone())
                state["z"].sub_(param.grad, alpha=group["lr"])
                param.lerp_(state["z"], 1 / group["k"])


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 5, bias=False), nn.Linear(5, WIDTH))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(2, 3)
def test_muon_sees_whole_matrices(precision):
    config = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}}}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}

    def mark(model):
        for param in model.parameters():
            param.use_muon = param.ndim == 2
        return list(model.parameters())

    expected = run(Matrices, 0, config=config, groups=mark)
    for stage in (1, 2, 3):
        assert_same_training(run(Matrices, stage, config=config, groups=mark), expected)


@pytest.mark.parametrize("kind", ["groups", "averaging", "rprop", "adagrad"])
@shared_ranks(2)
def test_optimizers_and_groups(kind):
    options = {
        "groups": {"groups": two_groups},
        "averaging": {"optimizer": lambda m: Averaging(m.parameters())},
        "rprop": {"optimizer": lambda m: torch.optim.Rprop(m.parameters())},
        "adagrad": {"optimizer": lambda m: torch.optim.Adagrad(two_groups(m), lr=0.1)},
    }[kind]
    expected = run(Tied, 0, **options)
    for stage in (1, 2, 3):
        assert_same_training(run(Tied, stage, **options), expected)
