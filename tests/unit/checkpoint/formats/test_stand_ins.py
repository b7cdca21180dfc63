"""Stand-ins: the file holds what the flat tensor would have held, whatever its parts."""

import io
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.formats import safe_load as looms
from deepspeed.checkpoint.formats.safe_load import StandIns
from deepspeed.checkpoint.formats.zero_files.writer import files
from deepspeed.errors import CheckpointError
from tests.checkpoint_states import SMALL

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def written(stand_ins, obj):
    file = io.BytesIO()
    stand_ins.dump(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_this_torch_hands_over_memory():
    assert StandIns.works()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000)), min_size=1, max_size=6),
    tail=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
)
def test_the_file_holds_the_parts(sizes, tail, dtype, strided):
    parts, place = [], 0
    for gap, size in sizes:
        part = torch.randint(0, 200, (2 * size if strided else size,)).to(dtype)
        parts.append((place + gap, part[::2] if strided else part))
        place += gap + size
    expected = torch.zeros(place + tail, dtype=dtype)
    for position, part in parts:
        expected[position : position + part.numel()] = part
    stand_ins = StandIns()
    stand_in = stand_ins.flat(parts, expected.numel(), dtype)
    found = written(
        stand_ins, {"flat": stand_in, "tied": [stand_in.view(1, -1)], "other": torch.arange(7), "text": "x"}
    )
    assert torch.equal(found["flat"], expected)
    assert torch.equal(found["tied"][0], expected.view(1, -1))
    assert torch.equal(found["other"], torch.arange(7))


def test_no_memory_is_made():
    """A gibibyte of stand-ins for one kilobyte of values costs a few pages."""
    before = resident()
    stand_ins = StandIns()
    stand_in = stand_ins.flat([(5, torch.ones(250))], 2**28, torch.float32)

    class Count:
        size = 0

        def write(self, data):
            self.size += len(memoryview(data).cast("B"))
            return 0

        def tell(self):
            return self.size

    count = Count()
    stand_ins.dump({"flat": stand_in}, count)
    assert count.size > 2**30
    assert resident() - before < 100 * 2**20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_torch_that_copies_is_found_out(monkeypatch):
    original = looms.dump

    def copying(obj, sink, zipped=True):
        held = io.BytesIO()
        original(obj, held)
        sink.write(held.getvalue())

    monkeypatch.setattr(looms, "dump", copying)
    StandIns.works.cache_clear()
    try:
        assert not StandIns.works()
        stand_ins = StandIns()
        with pytest.raises(CheckpointError, match="bytes of flat tensors in a way that is not known"):
            stand_ins.dump([stand_ins.flat([(0, torch.ones(9))], 9, torch.float32)], io.BytesIO())
    finally:
        StandIns.works.cache_clear()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_files_are_the_same_with_and_without(stage, monkeypatch):
    monkeypatch.setattr("deepspeed.checkpoint.formats.rank_files.LEAST", 1)
    for state in (SMALL.state(stage, rank, 2) for rank in range(2)):
        stand_ins = StandIns()
        plain, woven = files(state).objects, files(state, stand_ins=stand_ins).objects
        assert plain.keys() == woven.keys()
        for name, value in plain.items():
            assert_alike(written(stand_ins, woven[name]), written(stand_ins, value), name)


def assert_alike(one, other, where):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_alike(one[key], other[key], f"{where}: {key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for place, (mine, yours) in enumerate(zip(one, other, strict=True)):
            assert_alike(mine, yours, f"{where}[{place}]")
    else:
        assert one == other, where
