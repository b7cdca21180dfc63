"""A layer of experts where it is used unusually: experts of one's own, no tokens, copies, numbers that mean nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate

WIDTH = 6


class OwnExperts(nn.Module):
    """Experts of somebody's own, as `MOELayer` was always given them: [ranks, local experts, rows, M]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, rows):
        parts = rows.chunk(len(self.layers), dim=1)
        return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True)], dim=1)


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_layer_around_experts_of_ones_own(k, drops):
    torch.manual_seed(0)
    gate = TopKGate(WIDTH, 4, k, drop_tokens=drops, min_capacity=0, use_rts=False, top2_2nd_expert_sampling=False)
    experts = OwnExperts(4)
    layer = MOELayer(gate, experts, "ep_size_1", 1, 4)
    tokens = torch.randn(6, WIDTH)
    routes = gate.route(tokens)
    expected = sum(
        torch.stack([experts.layers[e](t) for e, t in zip(chosen, tokens, strict=True)]) * weights.unsqueeze(1)
        for chosen, weights in zip(routes.experts, routes.weights, strict=True)
    )
    torch.testing.assert_close(layer(tokens), expected)


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_token_at_all(k, drops):
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, k=k, drop_tokens=drops, min_capacity=0)
    tokens = torch.zeros(0, WIDTH, requires_grad=True)
    out, loss, counts = layer(tokens)
    assert out.shape == (0, WIDTH)
    assert (loss.item(), counts.sum().item()) == (0.0, 0)
    (out.sum() + loss).backward()
    assert all(param.grad is None or not param.grad.isnan().any() for param in layer.parameters())


def test_a_copy_after_a_forward():
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, k=2, min_capacity=0, top2_2nd_expert_sampling=False)
    tokens = torch.randn(5, WIDTH)
    out, *_ = layer(tokens)
    made = copy.deepcopy(layer)
    assert not made.deepspeed_moe.l_aux.requires_grad
    torch.testing.assert_close(made(tokens)[0], out)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"capacity_factor": -1.0}, "capacity_factor is -1.0"),
        ({"eval_capacity_factor": math.nan}, "eval_capacity_factor is nan"),
        ({"min_capacity": -1}, "min_capacity is -1"),
        ({"num_experts": 0}, "num_experts is 0"),
    ],
)
def test_numbers_that_mean_nothing(given, told):
    with pytest.raises(UsageError, match=told):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), **{"num_experts": 4, **given})


def test_used_tokens_are_as_many_as_tokens():
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, min_capacity=0)
    with pytest.raises(UsageError, match="used_token has 3 entries, but there are 4 tokens"):
        layer(torch.randn(4, WIDTH), torch.ones(3))
