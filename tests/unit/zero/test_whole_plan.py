"""Where matrices are computed: every one once, by a rank that holds a part of it, the work divided."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.fragments import ContiguousLayout, StripedLayout
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.groups import Dtypes, ShardGroup
from deepspeed.zero.states.matrices import ShardedMatrices, plan, stretches


@given(
    st.lists(st.integers(0, 3000), max_size=30),
    st.integers(1, 9),
    st.sampled_from([ContiguousLayout, StripedLayout]),
    st.integers(1, 500),
)
def test_every_parameter_once_by_a_holder(numels, world, kind, limit):
    layout = kind(tuple(numels), world)
    planned = plan(layout, limit)
    owners = dict(planned.settled)
    for each in planned.rounds:
        assert list(each) == sorted(each)
        for rank, params in each.items():
            assert params
            for param in params:
                assert param not in owners
                owners[param] = rank
    assert sorted(owners) == [place for place, numel in enumerate(numels) if numel]
    for param, rank in owners.items():
        start, stop = layout.interval(param, rank)
        assert start < stop
    for param in planned.settled:
        start, stop = layout.interval(param, planned.settled[param])
        assert (start, stop) == (0, numels[param])


@pytest.mark.parametrize("world", [2, 8, 512])
def test_equal_matrices_are_divided_equally(world):
    planned = plan(StripedLayout((4096,) * (3 * world), world), limit=4096)
    for each in planned.rounds:
        assert {rank: len(params) for rank, params in each.items()} == dict.fromkeys(range(world), 1)
    assert len(planned.rounds) == 3


def test_matrices_within_a_block_do_not_travel():
    planned = plan(ContiguousLayout((100, 100, 100, 100), 2))
    assert (planned.settled, planned.rounds) == ({0: 0, 1: 0, 2: 1, 3: 1}, [])
    planned = plan(ContiguousLayout((100, 200, 100), 2))
    assert planned.settled == {0: 0, 2: 1}
    assert planned.rounds == [{0: (1,)}]


@given(
    st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 9), st.sampled_from([ContiguousLayout, StripedLayout])
)
def test_the_least_busy_holder_computes(numels, world, kind):
    """Against a search through all ranks."""
    layout = kind(tuple(numels), world)
    planned = plan(layout, limit=10**9)
    load = [0.0] * world
    for param, rank in planned.settled.items():
        load[rank] += numels[param] ** 1.5
    owners = {param: rank for each in planned.rounds for rank, params in each.items() for param in params}
    for param in sorted(owners, key=lambda param: (-numels[param], param)):
        assert owners[param] == min(layout.holders(param), key=lambda rank: (load[rank], rank))
        load[owners[param]] += numels[param] ** 1.5


@given(
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(1, 20),
    st.sampled_from([ContiguousLayout, StripedLayout]),
    st.data(),
)
def test_stretches_say_what_every_rank_holds(numels, world, kind, data):
    layout = kind(tuple(numels), world)
    params = data.draw(st.permutations(range(len(numels)))) if numels else []
    params = [param for param in params if numels[param]]
    held = {}
    for each in stretches(layout, params):
        for rank in each.ranks:
            assert rank not in held
            held[rank] = list(each.sizes)
    for rank in range(world):
        intervals = [layout.interval(param, rank) for param in params]
        assert held.get(rank, [0] * len(params)) == [stop - start for start, stop in intervals]


def steps_of(function):
    """The lines that a call executes."""
    count = 0

    def trace(_frame, event, _argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", [ContiguousLayout, StripedLayout])
def test_many_ranks_cost_no_more_than_few(kind):
    matrices = (2048 * 2048,) * 400
    layouts = {world: kind(matrices, world) for world in (64, 16384)}
    few, many = (steps_of(lambda layout=layout: plan(layout)) for layout in layouts.values())
    assert many < 3 * few  # 14 levels of ranks instead of 6


def round_of(world):
    """A step of the first of so many ranks over matrices that lie on all of them; the others answer with ones."""
    params = [nn.Parameter(torch.zeros(128, 128)) for _ in range(40)]
    axis = SimpleNamespace(rank=0, size=world, group=None)
    wide = Dtypes(torch.float32, torch.float32, torch.float32)
    group = ShardGroup([(str(at), param) for at, param in enumerate(params)], Placement(axis), wide, {})
    group.layout = StripedLayout((128 * 128,) * len(params), world)
    for param in params:
        stop = group.layout.interval(0, 0)[1]
        group.pieces.append(StatePiece("", param, param.shape, (0, stop), torch.zeros(stop)))
    masters = [piece.master for piece in group.pieces]
    matrices = ShardedMatrices([group])
    return list(matrices.apply(group.options, masters, [m.detach() for m in masters], lambda _, wholes: wholes))


def test_a_round_over_many_ranks_costs_no_more_than_one_over_few(monkeypatch):
    splits = []

    def exchange(coming, sending, comes, sends, group):
        assert (coming.numel(), sending.numel()) == (sum(comes), sum(sends))
        splits.append(len(comes))
        coming.fill_(1.0)

    monkeypatch.setattr("deepspeed.comm.all_to_all_single", exchange)
    few, many = (steps_of(lambda world=world: round_of(world)) for world in (64, 16384))
    assert splits == [64, 64, 16384, 16384]
    assert many < 3 * few
