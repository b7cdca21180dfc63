"""The estimators: published numbers, the printed table, what counts as a parameter."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from deepspeed import memory
from deepspeed.memory import (
    Spread,
    Widths,
    estimate_zero1_model_states_mem_needs,
    estimate_zero1_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    model_states,
)

MILLION = 10**6


def test_stage_2_numbers():
    estimate = estimate_zero2_model_states_mem_needs
    assert estimate(1000) == (24000, 2000)
    assert estimate(1000, 4, 1, False) == (24000, 6500)
    assert estimate(1000, 4, 2, True) == (48000, 2000)
    assert estimate(1000, 4, 2, False) == (24000, 4250)
    assert estimate(1000, 4, 2, False, additional_buffer_factor=1.0) == (16000, 4250)


def test_stage_1_keeps_gradients_whole():
    estimate = estimate_zero1_model_states_mem_needs
    assert estimate(1000) == (24000, 4000)
    assert estimate(1000, 4, 1, False) == (24000, 4000 + 4000)
    assert estimate(1000, 4, 2, True) == (48000, 4000)
    for gpus in (1, 8, 512):
        (_, one), (_, two) = (
            function(512 * MILLION, gpus, 1, False) for function in (estimate, estimate_zero2_model_states_mem_needs)
        )
        assert one - two == 1024 * MILLION - 1024 * MILLION // gpus


@pytest.mark.parametrize(
    ("machine", "offload", "offload_params", "zero_init", "expected"),
    [
        ((1, 1), True, True, True, (2700000, 12000)),
        ((4, 2), True, True, True, (1350000, 12000)),
        ((4, 2), True, True, False, (2400000, 12000)),
        ((2, 9), True, True, True, (300000, 12000)),
        ((4, 1), True, False, True, (2400000, 62000)),
        ((2, 9), True, False, True, (266666, 23111)),
        ((2, 9), True, False, False, (1200000, 23111)),
        ((4, 2), False, False, True, (72000, 237000)),
        ((4, 2), False, True, True, (72000, 237000)),
        ((4, 2), False, False, False, (2400000, 237000)),
    ],
)
def test_stage_3_numbers(machine, offload, offload_params, zero_init, expected):
    found = estimate_zero3_model_states_mem_needs(100000, 3000, *machine, offload, offload_params, zero_init)
    assert found == (*expected, 12000)


def test_tables(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(2851 * MILLION, num_gpus_per_node=8, num_nodes=2)
    assert capsys.readouterr().out == (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        "HW: Setup with 2 nodes, 8 GPUs per node.\n"
        "SW: Model with 2851M total params.\n"
        "  per CPU  |  per GPU |   Options\n"
        "  254.90GB |   5.31GB | offload_optimizer=cpu\n"
        "  127.45GB |   8.30GB | offload_optimizer=none\n"
    )
    estimate_zero1_model_states_mem_needs_all_cold(2851 * MILLION, num_gpus_per_node=8, num_nodes=2)
    assert capsys.readouterr().out.splitlines()[4:] == [
        "  254.90GB |  10.62GB | offload_optimizer=cpu",
        "  127.45GB |  13.28GB | offload_optimizer=none",
    ]
    estimate_zero3_model_states_mem_needs_all_cold(285100 * MILLION, 32 * MILLION, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out == (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        "HW: Setup with 1 node, 8 GPUs per node.\n"
        "SW: Model with 285100M total params, 32M largest layer params.\n"
        "  per CPU  |  per GPU |   Options\n"
        " 7169.04GB |   0.12GB | offload_param=cpu, offload_optimizer=cpu, zero_init=1\n"
        " 12744.96GB |   0.12GB | offload_param=cpu, offload_optimizer=cpu, zero_init=0\n"
        " 6372.48GB |  66.50GB | offload_param=none, offload_optimizer=cpu, zero_init=1\n"
        " 12744.96GB |  66.50GB | offload_param=none, offload_optimizer=cpu, zero_init=0\n"
        "    1.43GB | 597.54GB | offload_param=none, offload_optimizer=none, zero_init=1\n"
        " 12744.96GB | 597.54GB | offload_param=none, offload_optimizer=none, zero_init=0\n"
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2000, 1000)
        self.inner = nn.Sequential(nn.Linear(1000, 3000), nn.Linear(3000, 1000))
        self.head = nn.Linear(1000, 2000, bias=False)
        self.head.weight = self.embedding.weight


TOTAL = 2 * MILLION + 3 * MILLION + 3000 + 3 * MILLION + 1000
LARGEST = 3 * MILLION + 3000


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "meta", "sharded"])
def test_a_live_model(stage, kind, capsys):
    with torch.device("meta"):
        model = Tied()
    if kind == "plain":
        model = model.to_empty(device="cpu")
        model.head.weight = model.embedding.weight
    if kind == "sharded":
        for param in model.parameters():
            param.ds_numel = param.numel()
            param.data = torch.empty(0, device="meta")
    live = getattr(memory, f"estimate_zero{stage}_model_states_mem_needs_all_live")
    cold = getattr(memory, f"estimate_zero{stage}_model_states_mem_needs_all_cold")
    live(model, num_gpus_per_node=4, num_nodes=1)
    printed = capsys.readouterr().out
    cold(*([TOTAL, LARGEST] if stage == 3 else [TOTAL]), num_gpus_per_node=4, num_nodes=1)
    assert printed == capsys.readouterr().out
    assert "8M total params" in printed


def test_signatures():
    names = {
        "estimate_zero2_model_states_mem_needs": "total_params num_gpus_per_node num_nodes cpu_offload "
        "additional_buffer_factor",
        "estimate_zero2_model_states_mem_needs_all_live": "model num_gpus_per_node num_nodes additional_buffer_factor",
        "estimate_zero3_model_states_mem_needs": "total_params largest_layer_params num_gpus_per_node num_nodes "
        "cpu_offload cpu_offload_params zero_init additional_buffer_factor",
        "estimate_zero3_model_states_mem_needs_all_cold": "total_params largest_layer_params num_gpus_per_node "
        "num_nodes additional_buffer_factor",
    }
    for name, expected in names.items():
        assert list(inspect.signature(getattr(memory, name)).parameters) == expected.split()


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (8, 4), (8, 128)])
def test_without_offload_they_agree_with_the_exact_arithmetic(gpus, nodes):
    total, layer, world = 1024 * MILLION, 4096, gpus * nodes
    # gradients of 16 bits, whole at stage 1; their fp32 copy, sharded; at stage 3 only that
    for stage, estimate, grad, copy in (
        (1, estimate_zero1_model_states_mem_needs, 2, 4 * total // world),
        (2, estimate_zero2_model_states_mem_needs, 2 + 4, 0),
    ):
        exact = model_states([[total]], Spread(stage, world), widths=Widths(grad=grad)).total
        assert estimate(total, gpus, nodes, cpu_offload=False)[1] == exact + copy
    exact = model_states([[total]], Spread(3, world), widths=Widths(grad=4)).total
    needs = estimate_zero3_model_states_mem_needs(total, layer, gpus, nodes, False, False)
    assert needs[1:] == (exact + 4 * layer, 4 * layer)
