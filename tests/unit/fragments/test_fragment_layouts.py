"""Layouts and boxes: every element is somewhere, once, and where DeepSpeed's files have it."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.fragments import ContiguousLayout, StripedLayout, boxes, intersection, round_robin

numels = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(tuple)


@given(numels, st.integers(1, 9), st.sampled_from([1, 2, 8]), st.sampled_from([1, 4]))
def test_block_covers_every_element_once(sizes, world, align, gap):
    layout = ContiguousLayout(sizes, world, align=align, gap=gap)
    assert layout.shard_numel % align == 0
    assert layout.padded == layout.shard_numel * world >= layout.filled
    for param, numel in enumerate(sizes):
        assert layout.starts[param] % gap == 0
        reached = 0
        for rank in range(world):
            start, stop = layout.interval(param, rank)
            if start < stop:
                assert start == reached
                assert rank * layout.shard_numel + layout.position(param, rank) == layout.starts[param] + start
                assert layout.position(param, rank) + stop - start <= layout.shard_numel
                assert param in layout.members(rank)
                reached = stop
        assert reached == numel


@given(numels, st.integers(1, 9))
def test_striped_covers_every_element_once(sizes, world):
    layout = StripedLayout(sizes, world)
    for param, numel in enumerate(sizes):
        parts = [layout.interval(param, rank) for rank in range(world)]
        assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
        assert (parts[0][0], parts[-1][1]) == (0, numel)
        assert all(stop - start <= layout.chunk(param) for start, stop in parts)
    assert layout.shard_numel == sum(layout.chunk(param) for param in range(len(sizes)))


@given(numels, st.integers(1, 9), st.sampled_from([1, 2, 8]), st.sampled_from([1, 4, 16]))
def test_holders_are_those_that_hold_something(sizes, world, align, gap):
    for layout in (ContiguousLayout(sizes, world, align=align, gap=gap), StripedLayout(sizes, world)):
        for param in range(len(sizes)):
            parts = [layout.interval(param, rank) for rank in range(world)]
            held = [stop - start for start, stop in parts]
            holders = layout.holders(param)
            assert list(holders) == [rank for rank in range(world) if held[rank]]
            assert len({held[rank] for rank in holders[1:-1]}) <= 1


def test_holders_of_no_parameter_at_all():
    assert list(ContiguousLayout((0, 0), 4).holders(1)) == []
    assert list(StripedLayout((0,), 4).holders(0)) == []


def test_the_numbers_of_deepspeeds_files():
    block = ContiguousLayout((18,), 2)
    assert (block.shard_numel, block.interval(0, 1)) == (10, (10, 18))
    assert StripedLayout((35, 15, 15, 35), 2).shard_numel == 18 + 8 + 8 + 18


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple), st.data())
def test_boxes_cover_an_interval_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = list(boxes(shape, start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    index = torch.arange(numel).view(shape)
    parts = [index[tuple(slice(o, o + z) for o, z in zip(*box, strict=True))].reshape(-1) for box in found]
    assert torch.cat([*parts, torch.empty(0, dtype=torch.long)]).tolist() == list(range(start, stop))


@given(*[st.integers(0, 9)] * 4)
def test_intersection(a, b, c, d):
    one, other = (min(a, b), max(a, b)), (min(c, d), max(c, d))
    start, stop = intersection(one, other)
    assert set(range(start, stop)) == set(range(*one)) & set(range(*other))


def test_round_robin_deals_in_turn():
    assert round_robin(range(5), 2) == [0, 2, 4, 1, 3]
    for world in (1, 2, 3, 7):
        assert sorted(itertools.chain(round_robin(range(5), world))) == [0, 1, 2, 3, 4]
