"""Experts in files: which rank holds which, and what they are called there and in the whole model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.formats.zero_files.experts import (
    ExpertGrid,
    ExpertLayers,
    layer_of,
    number_of,
    renumbered,
)
from deepspeed.errors import CheckpointError
from deepspeed.parallel import ParallelLayout

BEGIN = "a.deepspeed_moe.experts.deepspeed_experts."


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_ranks_are_those_of_the_layout(ep, edp, data_first):
    axes = ParallelLayout.plan(world=ep * edp).experts(ep, data_first=data_first)
    grid = ExpertGrid(ep, edp, data_first)
    for rank in range(ep * edp):
        assert grid.part_of(rank) == axes.ep.group_of(rank).index(rank)
        assert grid.copy_of(rank) == axes.edp.group_of(rank).index(rank)
        assert grid.rank(grid.part_of(rank), grid.copy_of(rank)) == rank


def test_names():
    assert (layer_of(f"{BEGIN}3.w"), number_of(f"{BEGIN}3.w")) == (BEGIN, 3)
    assert renumbered(f"{BEGIN}3.w", 4) == f"{BEGIN}7.w"
    assert layer_of("a.gate.wg.weight") is None
    assert renumbered("a.gate.wg.weight", 4) == "a.gate.wg.weight"


def test_names_of_another_layout():
    layers = ExpertLayers({BEGIN: 4}, world=4)
    assert layers.names([f"{BEGIN}0.w", f"{BEGIN}1.w", "x"], 2, 1) == [f"{BEGIN}2.w", f"{BEGIN}3.w", "x"]
    mine = [["x"], [f"{BEGIN}3.w", f"{BEGIN}3.b"]]  # of a rank with one expert
    assert layers.expanded(mine, [0, 2]) == [["x"], [f"{BEGIN}{at}.{kind}" for at in (0, 1) for kind in "wb"]]
    groups = [{"name": "dense-params"}, {"name": "ep_size_2", "moe": True}, {"name": "ep_size_4"}]
    assert layers.of_groups(groups) == [0, 2, 0]
    with pytest.raises(CheckpointError, match="do not fit the 4 ranks"):
        layers.grid(3)
    with pytest.raises(CheckpointError, match="a layer of 4 experts cannot be spread over 8 ranks"):
        layers.shift(f"{BEGIN}0.w", 8, 1)
