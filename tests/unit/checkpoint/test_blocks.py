"""Reading by blocks: whatever range is asked for arrives whole and compared, in whatever order."""

import os
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.blocks import FileCheck
from deepspeed.checkpoint.checksum import PIECE, RunningSums
from deepspeed.checkpoint.stream import FileFacts
from deepspeed.errors import CheckpointError

BLOCK = 1000
SIZE = 7 * BLOCK + 123


def facts_of(data, block=BLOCK):
    sums = RunningSums(block)
    sums.add(data)
    return FileFacts(len(data), sums.finish(), block)


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=5))
def test_any_ranges(tmp_path, threads, ranges):
    data = os.urandom(SIZE)
    (tmp_path / "x").write_bytes(data)
    check = FileCheck(tmp_path / "x", facts_of(data), threads=threads)
    for start, stop in ranges:
        out = bytearray(stop - start)
        check.fill(start, memoryview(out))
        assert out == data[start:stop]
    under = {block for start, stop in ranges if start < stop for block in range(start // BLOCK, -(-stop // BLOCK))}
    assert check.checked == under


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_several_pieces(tmp_path, threads):
    data = os.urandom(5 * PIECE + 77)
    (tmp_path / "x").write_bytes(data)
    check = FileCheck(tmp_path / "x", facts_of(data, 2 * PIECE), threads=threads)
    for start, stop in ((PIECE // 2, 3 * PIECE), (0, len(data)), (4 * PIECE, 4 * PIECE + 5)):
        out = bytearray(stop - start)
        check.fill(start, memoryview(out))
        assert out == data[start:stop]


@pytest.mark.parametrize("threads", [1, 3])
def test_damage_is_an_error_that_names_the_range(tmp_path, threads):
    data = bytearray(os.urandom(SIZE))
    facts = facts_of(data)
    data[3 * BLOCK + 5] ^= 4
    (tmp_path / "x").write_bytes(data)
    check = FileCheck(tmp_path / "x", facts, threads=threads)
    check.fill(0, memoryview(bytearray(2 * BLOCK)))
    for start in (2 * BLOCK, 3 * BLOCK + 900):  # also where the wanted bytes themselves are good
        with pytest.raises(CheckpointError, match=r"x: damaged between bytes 3000 and 4000 of 7123"):
            check.fill(start, memoryview(bytearray(BLOCK + 10)))
    (tmp_path / "x").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated: 7122 bytes, the manifest says 7123"):
        check.fill(0, memoryview(bytearray(10)))


def test_sums_of_the_first_version(tmp_path):
    data = os.urandom(SIZE)
    sums = tuple(zlib.crc32(data[place : place + BLOCK]) for place in range(0, SIZE, BLOCK))
    (tmp_path / "x").write_bytes(data)
    out = bytearray(SIZE)
    FileCheck(tmp_path / "x", FileFacts(SIZE, sums, BLOCK, "crc32")).fill(0, memoryview(out))
    assert out == data
