"""Files that ranks with experts write, whatever their grid is, have all of the model, each expert by its number."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.formats.consolidate import fp32_weights
from deepspeed.checkpoint.formats.detect import ModelShare, open_checkpoint
from deepspeed.checkpoint.formats.native import writer as native
from deepspeed.checkpoint.formats.native.writer import INDEX
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.checkpoint.formats.zero_files import writer as deepspeed_files
from deepspeed.errors import CheckpointError
from tests.unit.moe.spread_states import BUFFERS, Grid, states, whole_model


@st.composite
def grids(draw, tensor=1):
    world = draw(st.sampled_from([1, 2, 3, 4]))
    dealt = draw(st.booleans()) and tensor > 1
    sizes = [ep for ep in (1, 2, 4) if world * (tensor if dealt else 1) % ep == 0]
    stage = draw(st.integers(0, 3))
    one, two = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    return Grid(stage, world, one, two, draw(st.booleans()), tensor, dealt)


def check(source, whole):
    everything = {**whole["master"], **whole["fixed"]}
    assert set(source.shapes) == set(everything)
    for name, tensor in everything.items():
        assert source.shapes[name] == tensor.shape, name
        assert torch.equal(source.read(name, "param").view(tensor.shape), tensor), name
    for kind in ("master", "exp_avg"):
        for name, tensor in whole[kind].items():
            assert torch.equal(source.read(name, kind), tensor.reshape(-1)), f"{kind} of {name}"
            assert source.scalars(name)["step"] == 3, name
    listed = [name for names, _ in source.groups for name in names]
    assert sorted(set(listed)) == sorted(whole["master"])


@settings(max_examples=8, deadline=None)
@given(grids())
def test_safetensors(grid):
    with tempfile.TemporaryDirectory() as folder:
        for state in states(grid):
            native.files(state).write(Path(folder))
        check(open_checkpoint(folder), whole_model())


@settings(max_examples=14, deadline=None)
@given(st.one_of(grids(), grids(tensor=2)))
def test_deepspeed_files(grid):
    """Whole models out of them, by a reader and by the script that lies beside them."""
    whole = dict(whole_model())
    if grid.stage == 3:  # these files have no place for what is of experts and in no shard
        grid = Grid(3, grid.world, grid.one, grid.two, grid.data_first, grid.tensor, grid.dealt, frozen_experts=False)
        whole["fixed"] = {name: value for name, value in whole["fixed"].items() if name in ("frozen", *BUFFERS)}
    with tempfile.TemporaryDirectory() as folder:
        for state in states(grid):
            deepspeed_files.files(state).write(Path(folder))
        check(open_checkpoint(folder), whole)
        found = fp32_weights(open_checkpoint(folder))
        assert set(found) == {*whole["master"], *whole["fixed"]}
        for name, tensor in {**whole["master"], **whole["fixed"]}.items():
            assert torch.equal(found[name].contiguous(), tensor), name


def test_universal(tmp_path):
    for state in states(Grid(1, 2, 2, 4, tensor=2, dealt=True)):
        deepspeed_files.files(state).write(tmp_path / "tag")
    universal = open_checkpoint(convert(tmp_path / "tag", tmp_path / "universal"))
    for kind in ("master", "exp_avg"):
        for name, tensor in whole_model()[kind].items():
            assert torch.equal(universal.read(name, kind), tensor.reshape(-1)), f"{kind} of {name}"


@settings(max_examples=8, deadline=None)
@given(grids(tensor=2), st.sampled_from([1, 2, 4]), st.booleans())
def test_any_number_of_slices_reads(grid, tensor, dealt):
    """What a rank of other slices gets is its part of the whole."""
    grid = Grid(**{**_fields(grid), "frozen_experts": False})
    other, whole = Grid(1, 1, 1, 1, tensor=tensor, dealt=dealt), whole_model()
    splits = other.splits(whole["master"])
    with tempfile.TemporaryDirectory() as folder:
        for state in states(grid):
            deepspeed_files.files(state).write(Path(folder))
        for rank in range(tensor):
            source = open_checkpoint(folder, mp_rank=rank, share=ModelShare(splits=splits or None))
            for name, tensor_ in whole["exp_avg"].items():
                part = splits[name].cut(tensor_, rank) if name in splits else tensor_
                assert source.shapes[name] == part.shape, name
                assert torch.equal(source.read(name, "exp_avg"), part.reshape(-1)), name


def _fields(grid):
    return {name: getattr(grid, name) for name in grid.__dataclass_fields__}


def test_an_index_that_tells_of_no_ranks():
    with tempfile.TemporaryDirectory() as folder:
        for state in states(Grid(1, 4, 2, 4)):
            native.files(state).write(Path(folder))
        index = Path(folder) / INDEX
        good = index.read_text()
        for bad in (good.replace('"ep": 4', '"ep": 8'), good.replace('"ep": 4', '"ep": "4"')):
            index.write_text(bad)
            with pytest.raises(CheckpointError, match=r"experts|written by"):
                open_checkpoint(folder)
