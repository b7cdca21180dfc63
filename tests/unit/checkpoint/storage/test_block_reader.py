"""Reading by blocks: whatever range is asked for arrives whole and compared, in whatever order."""

import os
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.storage.block_reader import FileCheck, Range
from deepspeed.checkpoint.storage.block_writer import PIECE, FileFacts, RunningSums
from deepspeed.errors import CheckpointError

BLOCK = 1000
SIZE = 7 * BLOCK + 123


def facts_of(data, block=BLOCK):
    sums = RunningSums(block)
    sums.add(data)
    return FileFacts(len(data), sums.finish(), block)


def filled(check, ranges):
    """The bytes that `fill` brings for several ranges at once."""
    memory = [bytearray(stop - start) for start, stop in ranges]
    wanted = [Range(start, memoryview(out)) for (start, _), out in zip(ranges, memory, strict=True)]
    check.fill(wanted)
    return memory


RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=RANGES, second=RANGES)
def test_any_ranges(tmp_path, first, second):
    data = os.urandom(SIZE)
    (tmp_path / "x").write_bytes(data)
    check = FileCheck(tmp_path / "x", facts_of(data))
    for ranges in (first, second):
        assert filled(check, ranges) == [data[start:stop] for start, stop in ranges]
    both = [(start, stop) for start, stop in first + second if start < stop]
    assert check.checked == {block for start, stop in both for block in range(start // BLOCK, -(-stop // BLOCK))}


def test_blocks_of_several_pieces(tmp_path):
    data = os.urandom(5 * PIECE + 77)
    (tmp_path / "x").write_bytes(data)
    check = FileCheck(tmp_path / "x", facts_of(data, 2 * PIECE))
    ranges = [(PIECE // 2, 3 * PIECE), (3 * PIECE, 4 * PIECE + 9), (4 * PIECE + 9, 4 * PIECE + 12)]
    assert filled(check, ranges) == [data[start:stop] for start, stop in ranges]
    assert filled(check, [(0, len(data))]) == [data]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("block", [BLOCK, 4096, 12288])
def test_every_block_is_read_once(tmp_path, monkeypatch, block, shared):
    size = 7 * block + 123  # the end of a file is no whole page
    data = os.urandom(size)
    (tmp_path / "x").write_bytes(data)
    check = FileCheck(tmp_path / "x", facts_of(data, block), shared=shared)
    places = []
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, place: (places.append(place), original(fd, views, place))[1])
    ranges = [(start, min(start + 100, size)) for start in range(size - 1, 0, -77)]
    assert filled(check, ranges) == [data[start:stop] for start, stop in ranges]
    assert sorted(places) == list(range(0, size, block))


@pytest.mark.parametrize("threads", [1, 3])
def test_damage_is_an_error_that_names_the_range(tmp_path, threads):
    data = bytearray(os.urandom(SIZE))
    facts = facts_of(data)
    data[3 * BLOCK + 5] ^= 4
    (tmp_path / "x").write_bytes(data)
    check = FileCheck(tmp_path / "x", facts, threads=threads)
    filled(check, [(0, 2 * BLOCK)])
    for start in (2 * BLOCK, 3 * BLOCK + 900):  # also where the wanted bytes themselves are good
        with pytest.raises(CheckpointError, match=r"x: damaged between bytes 3000 and 4000 of 7123"):
            filled(check, [(start, start + BLOCK + 10)])
        with pytest.raises(CheckpointError, match=r"x: damaged between bytes 3000 and 4000 of 7123"):
            check.require(start, start + BLOCK + 10)
    (tmp_path / "x").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated: 7122 bytes, the manifest says 7123"):
        filled(check, [(0, 10)])


def test_sums_of_the_first_version(tmp_path):
    data = os.urandom(SIZE)
    sums = tuple(zlib.crc32(data[place : place + BLOCK]) for place in range(0, SIZE, BLOCK))
    (tmp_path / "x").write_bytes(data)
    assert filled(FileCheck(tmp_path / "x", FileFacts(SIZE, sums, BLOCK, "crc32")), [(0, SIZE)]) == [data]
