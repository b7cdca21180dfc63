"""ProcessTopology and its relatives against known answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import LayoutError
from deepspeed.parallel.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _balanced,
)


def test_row_major_with_the_last_axis_fastest():
    topo = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert [topo.get_rank(row=row, col=col) for row in range(2) for col in range(3)] == list(range(6))
    assert topo.get_coord(4) == (1, 1)
    assert (topo.get_coord(4).row, topo.get_coord(4).col) == (1, 1)
    assert topo.get_axis_names() == ["row", "col"]
    assert (topo.get_dim("row"), topo.get_dim("col"), topo.get_dim("depth")) == (2, 3, 0)
    assert topo.world_size() == 6
    assert topo.mapping[topo.ProcessCoord(row=1, col=2)] == 5


def test_comm_lists_of_three_axes():
    topo = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topo.get_axis_names() == ["pipe", "data", "model"]
    assert topo.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topo.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topo.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topo.get_axis_comm_lists("sequence") == []


def test_pipe_data_topology():
    topo = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert topo.get_axis_names() == ["pipe", "data"]
    assert topo.get_axis_list("pipe", 1) == [3, 4, 5]
    assert topo.get_axis_list("data", 1) == [1, 4]
    assert topo.get_rank_repr(4) == ""


def test_filter_match():
    topo = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topo.filter_match(pipe=0, data=1) == [2, 3]
    assert topo.filter_match(pipe=1, data=0, model=1) == [5]
    assert topo.filter_match() == list(range(8))
    assert topo.filter_match(pipe=7) == []


def test_rank_names():
    topo = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topo.get_rank_repr(5) == "model_01"
    assert topo.get_rank_repr(5, omit_axes=["data"]) == "pipe_01-model_01"
    assert topo.get_rank_repr(5, omit_axes=[], inner_sep="+", outer_sep="|") == "pipe+01|data+00|model+01"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_rank_and_coord_are_inverse_and_lists_tile(dims):
    topo = ProcessTopology(axes=list("abcd"[: len(dims)]), dims=dims)
    for rank in range(topo.world_size()):
        assert topo.get_rank(**topo.get_coord(rank)._asdict()) == rank
        assert topo.filter_match(**topo.get_coord(rank)._asdict()) == [rank]
    for axis in topo.axes:
        lists = topo.get_axis_comm_lists(axis)
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(topo.world_size()))
        assert all(len(ranks) == topo.get_dim(axis) for ranks in lists)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda topo: topo.get_rank(pipe=0), "no coordinate for axis 'data'"),
        (lambda topo: topo.get_rank(pipe=0, data=0, deep=1), "no axis 'deep'"),
        (lambda topo: topo.get_rank(pipe=0, data=9), "9 of axis 'data' is out of range"),
        (lambda topo: topo.filter_match(deep=0), "no axis 'deep'"),
        (lambda topo: topo.get_axis_list("deep", 0), "no axis 'deep'"),
        (lambda topo: topo.get_coord(4), "rank 4 is outside"),
    ],
)
def test_errors_name_the_axis(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(PipeDataParallelTopology(num_pp=2, num_dp=2))


@pytest.mark.parametrize(
    ("world", "pipe", "data"), [(1, 1, 1), (2, 2, 1), (4, 2, 2), (6, 2, 3), (8, 4, 2), (12, 6, 2), (7, 7, 1)]
)
def test_the_default_topology_deals_prime_factors_in_turn(world, pipe, data):
    topo = _balanced(world)
    assert (topo.get_dim("pipe"), topo.get_dim("data")) == (pipe, data)


def test_a_grid_needs_a_world():
    with pytest.raises(LayoutError, match=r"torch\.distributed is not initialised"):
        PipelineParallelGrid()
