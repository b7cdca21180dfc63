"""Files that ranks with experts write, whatever their grid is, have all of the model, each expert by its number."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.native import writer as native
from deepspeed.checkpoint.formats.native.writer import INDEX
from deepspeed.checkpoint.formats.zero_files import writer as deepspeed_files
from deepspeed.checkpoint.zero_to_fp32 import read_checkpoint
from deepspeed.errors import CheckpointError
from tests.unit.moe.spread_states import Grid, states, whole_buffers, whole_model


@st.composite
def grids(draw):
    world = draw(st.sampled_from([1, 2, 3, 4, 6]))
    sizes = [ep for ep in (1, 2, 4) if world % ep == 0]
    return Grid(
        draw(st.integers(0, 3)), world, draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes)), draw(st.booleans())
    )


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


@settings(max_examples=25, deadline=None)
@given(grids())
def test_safetensors(grid):
    with tempfile.TemporaryDirectory() as folder:
        for state in states(grid):
            native.files(state).write(Path(folder))
        check(open_checkpoint(folder), whole_model())


@settings(max_examples=25, deadline=None)
@given(grids())
def test_deepspeed_files(grid):
    whole = whole_model()
    with tempfile.TemporaryDirectory() as folder:
        for state in states(grid, frozen_experts=grid.stage < 3):
            deepspeed_files.files(state).write(Path(folder))
        if grid.stage == 3:
            whole["fixed"] = {name: value for name, value in whole["fixed"].items() if not _apart(name)}
        check(open_checkpoint(folder), whole)
        found = read_checkpoint(Path(folder))
        assert set(found.tensors) == {*whole["master"], *whole["fixed"]}
        for name, tensor in {**whole["master"], **whole["fixed"]}.items():
            assert torch.equal(found.tensors[name].contiguous(), tensor), name


def _apart(name):
    """Of experts, and in no shard: stage 3 of these files has no place for it."""
    return "deepspeed_experts" in name and (name.endswith("frozen") or name in whole_buffers())


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
