"""ParallelLayout without processes: axes, coordinates, splits and errors; groups are asked for in rank tests."""

from __future__ import annotations

import pytest

from deepspeed import parallel
from deepspeed.errors import LayoutError
from deepspeed.parallel import ParallelLayout


def test_the_worked_example():
    layout = ParallelLayout.build(world=64, pp=2, sp=2, tp=4, rank=37)
    assert layout.sizes == {"pp": 2, "dp": 4, "sp": 2, "tp": 4}
    assert layout.coords == {"pp": 1, "dp": 0, "sp": 1, "tp": 1}
    dp = layout["dp"]
    assert (dp.rank, dp.size, dp.ranks) == (0, 4, (37, 45, 53, 61))
    both = layout["dp", "sp"]
    assert (both.rank, both.size, both.ranks) == (1, 8, (33, 37, 41, 45, 49, 53, 57, 61))
    assert layout["sp", "dp"] is both
    assert layout.experts(ep=4)["ep"].ranks == (33, 37, 41, 45)
    assert layout.experts(ep=4)["edp"].ranks == (37, 53)
    assert layout.experts(ep=2)["edp"].ranks == (37, 45, 53, 61)
    assert layout.experts(ep=2) is layout.experts(ep=2)
    assert layout.world.ranks == tuple(range(64))


def test_plan_needs_no_rank():
    plan = ParallelLayout.plan(world=64, pp=2, sp=2, tp=4)
    assert plan["dp"].groups[0] == (0, 8, 16, 24)
    assert plan.experts(4).edp.size == 2


def test_node_split_of_an_axis():
    layout = ParallelLayout.build(world=16, tp=2, rank=5, ranks_per_node=8)
    inter, intra = layout["dp"].split(intra_node=True)
    assert intra.ranks == (1, 3, 5, 7)
    assert inter.ranks == (5, 13)
    assert (inter.rank, intra.rank) == (0, 2)


def test_split_in_runs():
    inter, intra = ParallelLayout.build(world=8, rank=6)["dp"].split(size=2)
    assert (inter.ranks, intra.ranks) == ((0, 2, 4, 6), (6, 7))


def test_split_reads_the_launcher_variables(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_SIZE", "4")
    inter, intra = ParallelLayout.build(world=8, rank=6)["dp"].split(intra_node=True)
    assert (inter.ranks, intra.ranks) == ((2, 6), (4, 5, 6, 7))


@pytest.mark.parametrize(("arguments", "shown"), [({}, "None"), ({"intra_node": True, "size": 2}, "2")])
def test_split_wants_exactly_one_way(arguments, shown):
    with pytest.raises(LayoutError, match=f"size={shown}. Give exactly one"):
        ParallelLayout.build(world=8, rank=0)["dp"].split(**arguments)


def test_without_a_world_only_one_rank_or_an_explicit_one_can_be_built():
    assert ParallelLayout.build(world=1)["dp"].size == 1
    with pytest.raises(LayoutError, match=r"torch\.distributed is not initialised"):
        ParallelLayout.build()
    with pytest.raises(LayoutError, match=r"torch\.distributed is not initialised"):
        ParallelLayout.build(world=4)


def test_a_group_needs_torch_distributed():
    with pytest.raises(LayoutError, match=r"Call deepspeed\.init_distributed"):
        _ = ParallelLayout.build(world=4, rank=0, tp=2)["tp"].group


def test_a_closed_layout_gives_no_groups():
    with ParallelLayout.build(world=4, rank=0) as layout:
        axis = layout["dp"]
    assert layout.closed
    with pytest.raises(LayoutError, match="layout is closed"):
        _ = axis.group
    layout.close()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda layout: layout["ep"], r"use layout.experts\(ep=…\)"),
        (lambda layout: layout["data"], "no axis 'data'"),
        (lambda layout: layout["dp", "dp"], "named twice"),
        (lambda layout: layout.experts(ep=2)["dp"], "use 'ep' or 'edp'"),
        (lambda layout: layout.experts(ep=3), "size 3 does not divide"),
        (lambda layout: layout.axis_group(ParallelLayout.plan(world=2)["dp"]), "covers 2 ranks"),
    ],
)
def test_questions_about_missing_axes(ask, message):
    layout = ParallelLayout.build(world=4, rank=0)
    assert layout["dp"].size == 4
    with pytest.raises(LayoutError, match=message):
        ask(layout)


def test_rank_must_be_in_the_world():
    with pytest.raises(LayoutError, match="rank 4 is outside the world; use 0 to 3"):
        ParallelLayout.build(world=4, rank=4)


def test_representations_tell_the_numbers():
    layout = ParallelLayout.build(world=16, tp=2, rank=3)
    assert repr(layout) == "ParallelLayout(pp=1, dp=8, sp=1, tp=2, rank=3)"
    assert repr(layout["tp"]) == "AxisGroup('tp', rank 1 of 2, ranks [2, 3])"
    assert "16 in all" in repr(layout.world)


def test_the_package_exports_what_it_says():
    for name in parallel.__all__:
        assert getattr(parallel, name) is not None
    assert dir(parallel) == sorted(parallel.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = parallel.nothing
