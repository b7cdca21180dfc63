"""Ranks that take different branches under stage 3: it works, or every rank is told at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.errors import CommError
from tests.closeness import Training, assert_same_training
from tests.harness import shared_ranks
from tests.models import share
from tests.user_models import whole

WIDTH = 6


class Experts(nn.Module):
    """Each batch goes through the experts that `choose` names, in that order."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, chosen):
        x = torch.tanh(self.first(x))
        for expert in chosen:
            x = x + torch.tanh(self.experts[expert](x))
        return self.last(x).square().mean()


def build(stage, model=Experts, **zero):
    torch.manual_seed(3)
    return deepspeed.initialize(
        model=model(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        },
    )[0]


def train(stage, choices, model=Experts, **zero):
    """`choices[step][rank]` are the experts of a rank in a step."""
    engine = build(stage, model, **zero)
    before, norms = whole(engine), []
    generator = torch.Generator().manual_seed(7)
    for step in choices:
        batch = torch.randn(4 * dist.get_world_size(), WIDTH, generator=generator)
        (mine,) = share((batch,), dist.get_rank(), dist.get_world_size())
        engine.backward(engine(mine, step[dist.get_rank()]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return Training(before, whole(engine), norms=norms)


SAME = [[0, 1], [0, 1], [0, 1]]
CASES = {
    "skipped": [SAME, SAME, [[0, 1], [1], [0]], SAME, [[], [0, 1], [0, 1]], SAME],
    "others": [SAME, SAME, [[0, 1], [2, 3], [1, 2]], SAME, [[3], [0, 1], []], SAME],
    "from the first": [[[0], [1], [2]], [[2], [3], [0]], [[0, 1, 2, 3], [], [1]], [[3, 2, 1], [0], [2]]],
    "order": [SAME, [[1, 0], [0, 1], [1, 0]], [[0, 1], [1, 0], [0, 1]], SAME],
    "more of one": [SAME, SAME, [[0, 1, 0, 1], [0, 1], [1]], SAME, [[3, 3, 3], [0], [0, 1, 2]]],
    "always changing": [[[i % 4], [(i + 1) % 4], [(i * 3) % 4, i % 2]] for i in range(8)],
}


@pytest.mark.parametrize("name", list(CASES))
@shared_ranks(2, 3)
def test_ranks_may_take_different_branches(name):
    expected = train(0, CASES[name])
    for stage in (1, 2, 3):
        assert_same_training(train(stage, CASES[name]), expected)


@pytest.mark.parametrize("keys", [{"stage3_prefetch_bucket_size": 0}, {"stage3_max_live_parameters": 50}])
@shared_ranks(2)
def test_whatever_is_gathered_ahead(keys):
    expected = train(0, CASES["others"])
    assert_same_training(train(3, CASES["others"], **keys), expected)


class Borrower(Experts):
    """Computes with the weights of layers that it does not call."""

    def forward(self, x, chosen):
        x = torch.tanh(self.first(x))
        for expert in chosen:
            x = x + nn.functional.linear(x, self.experts[expert].weight)
        return self.last(x).square().mean()


@pytest.mark.parametrize("name", ["others", "from the first"])
@shared_ranks(2)
def test_ranks_may_read_different_weights_of_other_modules(name):
    assert_same_training(train(3, CASES[name], Borrower), train(0, CASES[name], Borrower))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, more):
        x = torch.tanh(self.inner(x))
        return x + self.extra(x) if more else x


class Blocks(nn.Module):
    """What is chosen are the blocks that use all they have; a part of the first one is called by itself, too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x, chosen):
        x = self.blocks[0].inner(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, number in chosen, use_reentrant=False)
        return x.square().mean()


@shared_ranks(2)
def test_blocks_are_one_use_while_all_of_them_is_used():
    all_of, but_one, other = [[0, 1, 2]] * 2, [[0, 1]] * 2, [[0, 1, 2], [0]]
    for choices, joined in {"all": ([all_of] * 3 + [other], 3), "not all": ([other, but_one, all_of], 1)}.values():
        assert_same_training(train(3, choices, Blocks), train(0, choices, Blocks))
        engine = build(3, Blocks)
        for step in choices[:2]:
            engine.backward(engine(torch.randn(4, WIDTH), step[dist.get_rank()]))
            engine.step()
        uses = engine._parts.sharded.coordinator.schedule.uses.values()
        assert [len(use.parts) for use in uses if use.parts] == [2] * joined


@shared_ranks(2)
def test_evaluation_with_other_branches():
    engine = build(3)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        for step in range(4):
            engine(x, [step % 4] if dist.get_rank() else [])
    engine.backward(engine(x, [0]))
    engine.step()


@shared_ranks(2)
def test_a_rank_that_steps_while_another_runs_forward_is_named_on_both():
    engine = build(3)
    x = torch.randn(4, WIDTH)
    for _ in range(2):
        engine.backward(engine(x, [0]))
        engine.step()
    engine.backward(engine(x, [0]))
    with pytest.raises(CommError) as error:
        if dist.get_rank() == 1:
            with torch.no_grad():
                engine(x, [0])
        engine.step()
    assert "rank 0 is about to take an optimizer step" in str(error.value)
    assert "rank 1 begins a forward pass" in str(error.value)
