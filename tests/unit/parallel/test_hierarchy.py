"""Two-level splits of an axis: both levels tile, node borders hold, uneven cases are errors."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepspeed.errors import LayoutError
from deepspeed.parallel import hierarchy
from deepspeed.parallel.axes import LayoutPlan


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


def check(axis, levels) -> None:
    """Both levels tile the world, cross in one rank, and together make up the axis."""
    world = list(range(axis.world))
    for level in levels:
        assert sorted(rank for group in level.groups for rank in group) == world
    assert levels.inter.size * levels.intra.size == axis.size
    for rank in world:
        inter, intra = set(levels.inter.group_of(rank)), set(levels.intra.group_of(rank))
        assert inter & intra == {rank}
        assert inter | intra <= set(axis.group_of(rank))


@given(st.data(), st.integers(1, 3), st.integers(1, 12), st.integers(1, 3))
def test_runs_of_neighbours_tile(data, pp, dp, tp):
    axis = LayoutPlan.fit(pp * dp * tp, pp=pp, tp=tp)["dp"]
    levels = hierarchy.split(axis, data.draw(divisors(dp)))
    check(axis, levels)
    for group in axis.groups:
        assert group[: levels.intra.size] in levels.intra.groups


@given(st.data(), st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
def test_node_split_tiles_and_respects_nodes(data, pp, dp, sp, tp):
    plan = LayoutPlan.fit(pp * dp * sp * tp, pp=pp, sp=sp, tp=tp)
    per_node = data.draw(divisors(plan.world))
    axis = plan[data.draw(st.sampled_from(["dp", "tp", "sp", "pp", ("dp", "sp"), ("pp", "tp")]))]
    nodes = [[rank // per_node for rank in group] for group in axis.groups]
    assume(len({group.count(node) for group in nodes for node in group}) == 1)
    levels = hierarchy.node_split(axis, per_node)
    check(axis, levels)
    assert all(len({rank // per_node for rank in group}) == 1 for group in levels.intra.groups)
    assert all(len({rank // per_node for rank in group}) == len(group) for group in levels.inter.groups)


def test_two_nodes_of_four():
    axis = LayoutPlan.fit(8)["dp"]
    levels = hierarchy.node_split(axis, 4)
    assert levels.intra.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert levels.inter.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (levels.inter.name, levels.intra.name) == ("dp.inter", "dp.intra")


def test_nodes_with_different_numbers_of_ranks_are_refused():
    # 12 ranks as pp 2 × dp 6 on nodes of 4: a stage's 6 ranks lie 4 + 2 and 2 + 4.
    with pytest.raises(LayoutError, match=r"2 or 4 ranks on a node: \[\[0, 1, 2, 3\], \[4, 5\]\]"):
        hierarchy.node_split(LayoutPlan.fit(12, pp=2)["dp"], 4)


@pytest.mark.parametrize(("value", "intra"), [(0, 1), (1, 1), (2, 2), (8, 8), (64, 8)])
def test_hpz_takes_at_most_the_axis(value, intra):
    assert hierarchy.hpz_split(LayoutPlan.fit(8)["dp"], value).intra.size == intra


def test_hpz_groups_are_neighbours():
    split = hierarchy.hpz_split(LayoutPlan.fit(8)["dp"], 4)
    assert split.intra.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_hpz_errors_name_the_key():
    axis = LayoutPlan.fit(8)["dp"]
    with pytest.raises(LayoutError, match="zero_hpz_partition_size 3 does not divide the 8 ranks"):
        hierarchy.hpz_split(axis, 3)
    with pytest.raises(LayoutError, match="zero_hpz_partition_size is -1"):
        hierarchy.hpz_split(axis, -1)


def test_ranks_per_node_comes_from_the_argument_then_the_environment():
    assert hierarchy.ranks_per_node(8, 2, {"LOCAL_SIZE": "4"}) == 2
    assert hierarchy.ranks_per_node(8, None, {"LOCAL_SIZE": "4"}) == 4
    assert hierarchy.ranks_per_node(8, None, {"LOCAL_WORLD_SIZE": "8"}) == 8
    assert hierarchy.ranks_per_node(8, None, {"LOCAL_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}) == 4
    assert hierarchy.ranks_per_node(8, None, {"LOCAL_SIZE": "stray", "LOCAL_WORLD_SIZE": "8"}) == 8
    assert hierarchy.ranks_per_node(1, None, {}) == 1
    assert hierarchy.ranks_per_node(1, None, {"LOCAL_SIZE": "stray"}) == 1


@pytest.mark.parametrize(
    ("given_", "environ", "message"),
    [
        (None, {}, "neither LOCAL_SIZE nor LOCAL_WORLD_SIZE"),
        (None, {"LOCAL_SIZE": "9" * 5000}, "LOCAL_SIZE is '999"),
        (None, {"LOCAL_SIZE": "four"}, "LOCAL_SIZE is 'four'"),
        (3, {}, "3 ranks per node do not fill whole nodes with a world size of 8"),
        (16, {}, "16 ranks per node"),
        (0, {}, "0 ranks per node"),
    ],
)
def test_unknown_or_uneven_ranks_per_node_are_refused(given_, environ, message):
    with pytest.raises(LayoutError, match=message):
        hierarchy.ranks_per_node(8, given_, environ)


def test_split_size_must_divide():
    with pytest.raises(LayoutError, match="groups of 3 do not divide the 8 ranks of axis 'dp'"):
        hierarchy.split(LayoutPlan.fit(8)["dp"], 3)
