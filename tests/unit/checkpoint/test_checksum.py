"""The checksum of blocks: equal however the bytes come, different after any damage."""

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.checksum import PIECE, RunningSums, grid

ROW = 4096
SIZES = (0, 1, 7, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + ROW + 3)


def blocks_of(data, block):
    def one(part):
        value = 0
        for place in range(0, len(part), PIECE):
            value = grid(part[place : place + PIECE], value)
        return value

    return tuple(one(data[place : place + block]) for place in range(0, len(data), block))


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.sampled_from(SIZES), max_size=5), block=st.sampled_from([5000, ROW, PIECE, 2 * PIECE]))
def test_portions_do_not_matter(sizes, block):
    portions = [os.urandom(size) for size in sizes]
    sums = RunningSums(block)
    for portion in portions:
        sums.add(portion)
    assert sums.finish() == blocks_of(b"".join(portions), block)


@pytest.mark.parametrize("content", [os.urandom(3 * ROW + 77), bytes(3 * ROW + 77), b"\xff" * (3 * ROW + 77)])
def test_every_single_byte_matters(content):
    good = grid(content)
    data = bytearray(content)
    for place in range(0, len(data), 13):
        for flip in (1, 0x80, 0xFF):
            data[place] ^= flip
            assert grid(data) != good, f"byte {place} ^ {flip}"
            data[place] ^= flip


def test_damaged_ranges_are_seen():
    draw = random.Random(0)
    content = draw.randbytes(40 * ROW + 9)
    good = grid(content)
    for _ in range(500):
        low = draw.randrange(len(content))
        high = min(low + draw.choice((1, 8, 100, ROW, 3 * ROW)), len(content))
        for new in (bytes(high - low), draw.randbytes(high - low), b"\xff" * (high - low)):
            damaged = content[:low] + new + content[high:]
            assert (grid(damaged) == good) == (damaged == content)
        assert grid(content[:low]) != good


def test_places_matter():
    rows = [os.urandom(ROW) for _ in range(6)]
    good = grid(b"".join(rows))
    rows[1], rows[4] = rows[4], rows[1]
    assert grid(b"".join(rows)) != good  # rows that changed places
    words = [os.urandom(8) for _ in range(512)]
    good = grid(b"".join(words))
    words[3], words[200] = words[200], words[3]
    assert grid(b"".join(words)) != good  # columns
    pieces = [os.urandom(PIECE), os.urandom(PIECE)]
    assert blocks_of(b"".join(pieces), 2 * PIECE) != blocks_of(b"".join(reversed(pieces)), 2 * PIECE)


def test_the_value_is_fixed():
    """Checkpoints outlive the library that wrote them."""
    data = bytes(range(256)) * 40
    assert (grid(data), grid(b""), grid(b"abc")) == (0x9CB73345, 0, 0x352441C2)
