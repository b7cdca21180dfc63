"""The peak of a plan is that of the same step when it is computed, and its states those of the arithmetic."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from deepspeed.log import logger
from deepspeed.memory.budget import Spread, Widths, model_states
from deepspeed.memory.host import host_empty
from deepspeed.planning import plan
from deepspeed.planning.trace import pretended_rank
from deepspeed.planning.untouched import UntouchedMemory
from tests.covering import pairs
from tests.harness import ranks
from tests.unit.planning.planned import Decoder, config, example_batch, measured

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@ranks(1, init=False)
def test_the_peak_is_that_of_a_computed_step():
    for stage, recompute, away, steps in pairs([0, 1, 2, 3], [False, True], [False, True], [1, 2]):
        if away and not stage:
            continue
        values = config(stage, steps)
        values["zero_optimization"] |= OFFLOAD if away else {}
        found = plan(lambda again=recompute: Decoder(recompute=again), values, world=4, inputs=example_batch)
        real = measured(Decoder(recompute=recompute), values, 4)
        row = f"stage {stage}, recompute {recompute}, offload {away}, {steps} micro steps"
        assert abs(found.largest.peak.total - real.total) <= 0.02 * real.total, (row, found.largest.peak, real)
        assert sum(found.largest.kinds.values()) == found.largest.peak.total, "every byte has one kind"


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 8), (2, 64), (3, 8), (3, 1024)])
@ranks(1, init=False)
def test_states_are_those_of_the_arithmetic(stage, world):
    found = plan(Decoder, config(stage), world=world, inputs=example_batch).largest
    numels = [param.numel() for param in Decoder().parameters()]
    states = model_states([numels], Spread(stage, world, persistent=100), widths=Widths(grad=2))
    assert found.kinds["masters"] == states.masters
    assert abs(found.kinds["moments"] - states.optimizer) <= 4 * len(numels), "a few numbers of steps"
    assert found.parameters == sum(numels)


@ranks(1, init=False)
def test_copies_of_neighbours_are_planned():
    values = config(3)
    values["zero_optimization"] |= {"zero_hpz_partition_size": 4, "stage3_param_persistence_threshold": 0}
    found = plan(Decoder, values, world=16, per_node=4, inputs=example_batch).largest
    assert found.kinds["copies of neighbours"] == 2 * found.parameters / 4


@ranks(1, init=False)
def test_weights_are_never_there():
    """Of a model of 40 GB no page is provided."""
    before = resident()
    found = plan(lambda: Decoder(20480, 2), config(1), world=8, inputs=example_batch)
    assert found.largest.kinds["parameters"] > 19e9
    assert resident() - before < 300 << 20


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@ranks(1, init=False)
def test_the_process_is_what_it_was():
    state, hook, level = torch.get_rng_state(), sys.excepthook, logger.level
    with pretended_rank(3, 16, 8):
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (3, 16)
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert (sys.excepthook, logger.level) == (hook, level)
    assert not torch.distributed.is_initialized()


def test_what_is_small_is_computed_and_what_is_large_is_not():
    with UntouchedMemory():
        assert (torch.arange(4) + 1).tolist() == [1, 2, 3, 4]
        large = torch.ones(1 << 20)
        assert (large * 2).shape == large.shape
        assert (large + large).sum().item() == 0.0, "no number of a large tensor is ever read"
        assert large.view(-1)[:8].untyped_storage().nbytes() == 4 << 20


class Idle(Decoder):
    """A layer gets no gradients."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(8, 8)


@ranks(1, init=False)
def test_the_others_are_stepped_beside_an_unused_layer():
    for stage in (0, 2):
        found, real = plan(Idle, config(stage), world=4, inputs=example_batch), measured(Idle(), config(stage), 4)
        assert abs(found.largest.peak.total - real.total) <= 0.02 * real.total, (stage, found.largest.peak, real)


class Words(nn.Module):
    """An embedding of which a batch touches few rows."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 16, sparse=True), nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.words(tokens)).square().mean()


@ranks(1, init=False)
def test_sparse_gradients_are_planned_as_dense_ones():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    found = plan(Words, config, world=4, inputs=lambda batch, sequence: torch.zeros(batch, 8, dtype=torch.long))
    assert "all rows of sparse gradients travel: words" in found.assumed


@ranks(1, init=False)
def test_host_memory_of_other_engines_does_not_count():
    away = {**config(2), "zero_optimization": {"stage": 2, **OFFLOAD}}
    found = plan(Decoder, away, world=4, inputs=example_batch).largest
    kept = host_empty(1 << 20, torch.float32, pinned=False)
    assert plan(Decoder, away, world=4, inputs=example_batch).largest.host == found.host
    assert plan(Decoder, config(2), world=4, inputs=example_batch).largest.host == {}
    assert kept.nbytes == 4 << 20
