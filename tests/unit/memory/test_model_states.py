"""Exact bytes of model states, for as many ranks as one likes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import UsageError
from deepspeed.memory import ModelStates, Spread, Widths, model_states

GROUPS = st.lists(st.lists(st.integers(0, 5000), max_size=12), min_size=1, max_size=3)


def test_by_hand():
    # 10 + 7 elements in one group, 5 in another, 4 frozen; two ranks
    groups, frozen = [[10, 7], [5]], [4]
    assert model_states(groups, Spread(0, 2), frozen=frozen) == ModelStates(26 * 2, 22 * 4, 22 * 4, 22 * 8)
    # shards of 10 (17 padded to 20) and 4 (5 padded to 8)
    assert model_states(groups, Spread(1, 2), frozen=frozen) == ModelStates((28 + 4) * 2, 22 * 4, 14 * 4, 14 * 8)
    assert model_states(groups, Spread(1, 2, rank=1), frozen=frozen) == ModelStates(32 * 2, 22 * 4, 14 * 4, 8 * 8)
    assert model_states(groups, Spread(2, 2), frozen=frozen) == ModelStates(32 * 2, 14 * 4, 14 * 4, 14 * 8)
    # parts of 5 + 4, 3 and 2; the second rank has 5 + 3 and 2 of the trained ones
    assert model_states(groups, Spread(3, 2), frozen=frozen) == ModelStates(14 * 2, 12 * 4, 12 * 4, 12 * 8)
    assert model_states(groups, Spread(3, 2, rank=1), frozen=frozen) == ModelStates(14 * 2, 10 * 4, 10 * 4, 10 * 8)
    whole = model_states(groups, Spread(3, 2, persistent=5), frozen=frozen)
    assert whole.params == (14 + 6 + 4) * 2
    assert whole.total == 24 * 2 + 12 * 16


def test_parameters_that_begin_at_multiples():
    assert model_states([[3, 3]], Spread(2, 2, gap=4), widths=Widths(2, 4, 4, 8)) == ModelStates(16, 12, 16, 24)
    assert model_states([[3, 3]], Spread(2, 2, rank=1, gap=4)).optimizer == 24


def test_one_rank_is_stage_0():
    for stage in (1, 2, 3):
        assert model_states([[3, 5]], Spread(stage, 1), frozen=[7]) == model_states([[3, 5]], Spread(0, 1), frozen=[7])


def test_without_masters():
    states = model_states([[64]], Spread(2, 4), widths=Widths(param=4, grad=4, master=0, optimizer=8))
    assert states == ModelStates(256, 64, 0, 128)


@given(GROUPS, st.integers(0, 3), st.integers(1, 9))
def test_the_ranks_together_hold_everything_once(groups, stage, world):
    widths = Widths(1, 1, 1, 1)
    total = sum(map(sum, groups))
    ranks = [model_states(groups, Spread(stage, world, rank), widths=widths) for rank in range(world)]
    copies = world if stage == 0 else 1
    assert sum(rank.optimizer for rank in ranks) == total * copies
    assert max(rank.optimizer for rank in ranks) == ranks[0].optimizer
    assert len({rank.params for rank in ranks}) == 1
    if stage >= 2:
        assert sum(rank.grads for rank in ranks) == total
    if stage in (1, 2) and world > 1:
        assert total <= ranks[0].masters * world < total + len(groups) * 2 * world
        assert total <= ranks[0].params < total + len(groups) * 2 * world
    if stage == 3 and world > 1:
        assert total <= ranks[0].params * world < total + sum(map(len, groups)) * world + 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_512_ranks_match_the_formula(stage):
    # the shape of a 1.1B Llama: 16 layers and two embeddings
    layer = [2048 * 2048, 512 * 2048, 512 * 2048, 2048 * 2048, *[8192 * 2048] * 3, 2048, 2048]
    numels = [32000 * 2048, *(layer * 16), 2048, 32000 * 2048]
    total, world = sum(numels), 512
    formula = {1: 2 * total + 4 * total + 12 * total / world, 2: 2 * total + 16 * total / world, 3: 18 * total / world}
    for rank in (0, 1, 255, 511):
        states = model_states([numels], Spread(stage, world, rank))
        assert states.total == pytest.approx(formula[stage], rel=1e-3, abs=16 * 2 * world)
    held = sum(model_states([numels], Spread(stage, world, rank)).optimizer for rank in range(world))
    assert held == 8 * total


def test_misuse():
    with pytest.raises(UsageError, match="stage is 4"):
        Spread(4, 2)
    with pytest.raises(UsageError, match="rank is 2 of 2 ranks"):
        Spread(1, 2, rank=2)
