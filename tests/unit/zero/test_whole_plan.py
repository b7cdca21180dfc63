"""Where matrices are computed: every one once, by a rank that holds a part of it, the work divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.fragments import Block, Striped
from deepspeed.zero.states.matrices import plan


@given(
    st.lists(st.integers(0, 3000), max_size=30),
    st.integers(1, 9),
    st.sampled_from([Block, Striped]),
    st.integers(1, 500),
)
def test_every_parameter_once_by_a_holder(numels, world, kind, limit):
    layout = kind(tuple(numels), world)
    planned = plan(layout, limit)
    owners = dict(planned.settled)
    for each in planned.rounds:
        for rank in range(world):
            for param in each.owned[rank]:
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
    planned = plan(Striped((4096,) * (3 * world), world), limit=4096)
    assert all([len(each.owned[rank]) for rank in range(world)] == [1] * world for each in planned.rounds)
    assert len(planned.rounds) == 3


def test_matrices_within_a_block_do_not_travel():
    planned = plan(Block((100, 100, 100, 100), 2))
    assert (planned.settled, planned.rounds) == ({0: 0, 1: 0, 2: 1, 3: 1}, [])
    planned = plan(Block((100, 200, 100), 2))
    assert planned.settled == {0: 0, 2: 1}
    assert [sorted(each.owned) for each in planned.rounds] == [[(), (1,)]]
