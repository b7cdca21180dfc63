"""Rank arithmetic: every axis tiles the world exactly once, known rank lists, errors with numbers."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import LayoutError
from deepspeed.parallel import axes
from deepspeed.parallel.axes import GRID_AXES, Axis, LayoutPlan, RankGrid, expert_parallel_ranks

sizes = st.integers(1, 4)
grids = st.tuples(sizes, sizes, sizes, sizes)


def tiles(axis: Axis, world: int) -> None:
    """Checked from the outside, not with Axis' own check."""
    assert sorted(rank for group in axis.groups for rank in group) == list(range(world))
    assert len({len(group) for group in axis.groups}) == 1
    assert all(list(group) == sorted(group) for group in axis.groups)


def plan_of(grid: tuple[int, int, int, int]) -> LayoutPlan:
    pp, dp, sp, tp = grid
    return LayoutPlan.fit(math.prod(grid), pp=pp, dp=dp, sp=sp, tp=tp)


@given(grids)
def test_every_axis_tiles_the_world_exactly_once(grid):
    plan = plan_of(grid)
    assert [axis.size for axis in plan] == list(grid)
    for axis in plan:
        tiles(axis, plan.world)


@given(grids, st.sets(st.sampled_from(GRID_AXES), min_size=1))
def test_combined_axes_tile_and_differ_only_in_their_own_coordinates(grid, names):
    plan = plan_of(grid)
    axis = plan[tuple(names)]
    tiles(axis, plan.world)
    assert axis.size == math.prod(plan.sizes[name] for name in names)
    fixed = [place for place, name in enumerate(GRID_AXES) if name not in names]
    for group in axis.groups:
        assert len({tuple(plan.grid.coords(rank)[place] for place in fixed) for rank in group}) == 1


@given(st.lists(sizes, min_size=1, max_size=5))
def test_rank_and_coordinates_are_inverse(dims):
    grid = RankGrid(tuple("abcde"[: len(dims)]), tuple(dims))
    seen = [grid.coords(rank) for rank in range(grid.world)]
    assert seen == sorted(seen)
    assert len(set(seen)) == grid.world
    for rank, coords in enumerate(seen):
        assert grid.rank(dict(zip(grid.names, coords, strict=True))) == rank
        assert rank in grid.where({grid.names[0]: coords[0]})


@given(grids, st.data())
def test_experts_tile_the_world_and_cross_each_other_once(grid, data):
    plan = plan_of(grid)
    fold = data.draw(st.booleans())
    copies = plan["dp", "sp", "tp"] if fold else plan["dp", "sp"]
    ep = data.draw(st.sampled_from([n for n in range(1, copies.size + 1) if copies.size % n == 0]))
    experts = plan.experts(ep, data_first=data.draw(st.booleans()), fold_tp=fold)
    tiles(experts.ep, plan.world)
    tiles(experts.edp, plan.world)
    assert (experts.ep.size, experts.edp.size) == (ep, copies.size // ep)
    for rank in range(plan.world):
        ours, theirs = set(experts.ep.group_of(rank)), set(experts.edp.group_of(rank))
        assert ours & theirs == {rank}
        assert ours | theirs <= set(copies.group_of(rank))
        # The replicas of a rank's experts hold the same place in their own expert groups.
        assert {experts.ep.group_of(other).index(other) for other in theirs} == {experts.ep.group_of(rank).index(rank)}


def test_order_of_the_axes_is_pp_dp_sp_tp():
    plan = LayoutPlan.fit(16, pp=2, sp=2, tp=2)
    assert plan.sizes == {"pp": 2, "dp": 2, "sp": 2, "tp": 2}
    assert plan["tp"].groups[:3] == ((0, 1), (2, 3), (4, 5))
    assert plan["sp"].groups[:3] == ((0, 2), (1, 3), (4, 6))
    assert plan["dp"].groups[:3] == ((0, 4), (1, 5), (2, 6))
    assert plan["pp"].groups[:3] == ((0, 8), (1, 9), (2, 10))
    assert plan["sp", "dp"].groups == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))


def test_expert_groups_are_neighbours_and_replicas_are_strided():
    experts = LayoutPlan.fit(16).experts(2)
    assert experts.ep.groups == tuple((first, first + 1) for first in range(0, 16, 2))
    assert experts.edp.groups == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))


def test_data_first_swaps_neighbours_and_strides():
    experts = LayoutPlan.fit(16).experts(2, data_first=True)
    assert experts.edp.groups == (tuple(range(8)), tuple(range(8, 16)))
    assert experts.ep.groups == tuple((first, first + 8) for first in range(8))


def test_expert_ranks_with_tensor_parallel_experts():
    ep, edp = expert_parallel_ranks(16, tp=2, ep=4)
    assert ep == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    assert edp == [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]]


def test_expert_ranks_stay_within_a_pipeline_stage():
    ep, edp = expert_parallel_ranks(16, tp=2, ep=4, pp=2)
    assert ep == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert edp == [[rank] for rank in (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)]


def test_folded_experts_span_tensor_parallel_ranks():
    assert LayoutPlan.fit(8, tp=2).experts(4, fold_tp=True).ep.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_sixteen_thousand_ranks_are_planned():
    plan = LayoutPlan.fit(16384, pp=8, tp=8)
    experts = plan.experts(32)
    cut = [*plan, plan["dp", "sp"], plan["pp", "tp"], experts.ep, experts.edp]
    assert plan.sizes == {"pp": 8, "dp": 256, "sp": 1, "tp": 8}
    assert (experts.ep.size, experts.edp.size) == (32, 8)
    for axis in cut:
        tiles(axis, 16384)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"world": 12, "pp": 2, "tp": 4},
            "world size 12 is not divisible by pp 2 × tp 4 = 8. "
            "Use 8 or 16 processes, or change the pipeline/tensor sizes.",
        ),
        (
            {"world": 3, "sp": 4},
            "world size 3 is not divisible by sp 4. Use 4 processes, or change the sequence size.",
        ),
        (
            {"world": 16, "dp": 3, "tp": 4},
            "dp 3 × tp 4 = 12 processes are planned, but the world size is 16. "
            "Use 12 processes, or dp 4, or leave dp out.",
        ),
        ({"world": 0}, "world size is 0; it must be a whole number of at least 1."),
        ({"world": 4, "tp": -1}, "tp is -1; it must be a whole number of at least 1."),
        ({"world": 4, "tp": 1.5}, "tp is 1.5; it must be a whole number of at least 1."),
        ({"world": 4, "dp": True}, "dp is True; it must be a whole number of at least 1."),
    ],
)
def test_sizes_that_do_not_fit_say_so_with_numbers(arguments, message):
    with pytest.raises(LayoutError) as error:
        LayoutPlan.fit(**arguments)
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)


def test_expert_size_must_divide_the_copies_of_a_stage():
    with pytest.raises(LayoutError, match=r"size 3 does not divide the 8 ranks \(dp 4 × sp 2 = 8\).*1, 2, 4 or 8"):
        LayoutPlan.fit(16, sp=2, tp=2).experts(3)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda plan: plan["xp"], r"no axis 'xp'; the axes are \['pp', 'dp', 'sp', 'tp'\]"),
        (lambda plan: plan["dp", "dp"], "named twice"),
        (lambda plan: plan[()], "without a name"),
        (lambda plan: plan["dp"].group_of(8), "rank 8 is outside the world; use 0 to 7"),
        (lambda plan: plan.grid.coords(-1), "rank -1 is outside"),
        (lambda plan: plan.grid.rank({"pp": 0, "dp": 0, "sp": 0}), "no coordinate for axis 'tp'"),
        (
            lambda plan: plan.grid.rank({"pp": 0, "dp": 4, "sp": 0, "tp": 0}),
            "4 of axis 'dp' is out of range; use 0 to 3",
        ),
    ],
)
def test_questions_outside_the_grid_are_answered_with_its_limits(ask, message):
    with pytest.raises(LayoutError, match=message):
        ask(LayoutPlan.fit(8, tp=2))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (((0, 1), (2,)), r"sizes \[1, 2\]"),
        (((0, 1), (1, 2)), "exactly once"),
        (((0, 1), (3, 4)), "exactly once"),
        (((1, 0), (2, 3)), "not in rank order"),
        ((), r"sizes \[\]"),
    ],
)
def test_groups_that_do_not_tile_are_no_axis(groups, message):
    with pytest.raises(LayoutError, match=message):
        Axis("x", groups)


def test_a_grid_needs_one_size_for_each_of_its_distinct_axes():
    with pytest.raises(LayoutError, match="2 axes"):
        RankGrid(("a", "b"), (2,))
    with pytest.raises(LayoutError, match="named twice"):
        RankGrid(("a", "a"), (2, 2))


def test_the_arithmetic_does_not_need_torch():
    tree = ast.parse(Path(axes.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.split(".")[0] == "torch" for name in imported)
    assert {name for name in imported if name.startswith("deepspeed")} == {"deepspeed.errors"}


def test_roles_are_combinations_of_axes():
    plan = LayoutPlan.fit(64, pp=2, sp=2, tp=2)
    names = {"samples": ("dp", "sp"), "model": ("pp", "tp"), "stage": ("dp", "sp", "tp")}
    names |= {"data": ("dp",), "sequence": ("sp",), "tensor": ("tp",), "pipeline": ("pp",)}
    for role, names_of_role in names.items():
        assert getattr(plan, role) == plan[names_of_role]
    with pytest.raises(LayoutError, match=r"no axis 'cp'.*'pp', 'dp', 'sp', 'tp'"):
        LayoutPlan.fit(64, cp=2)
