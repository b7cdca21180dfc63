"""The checksum of blocks: equal however the bytes come, different after any damage."""

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.storage.block_writer import PIECE, RunningSums, columns

ROW = 1021 * 8
SIZES = (0, 1, 7, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + ROW + 3)


def blocks_of(data, block):
    def one(part):
        value = 0
        for place in range(0, len(part), PIECE):
            value = columns(part[place : place + PIECE], value)
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


@pytest.mark.parametrize("kind", ["random", "zeros", "ones"])
def test_every_single_byte_matters(kind):
    size = 3 * ROW + 77
    content = {"random": random.Random(1).randbytes(size), "zeros": bytes(size), "ones": b"\xff" * size}[kind]
    good = columns(content)
    data = bytearray(content)
    for place in range(0, len(data), 13):
        for flip in (1, 0x80, 0xFF):
            data[place] ^= flip
            assert columns(data) != good, f"byte {place} ^ {flip}"
            data[place] ^= flip


def test_damaged_ranges_are_seen():
    draw = random.Random(0)
    content = draw.randbytes(40 * ROW + 9)
    good = columns(content)
    for _ in range(500):
        low = draw.randrange(len(content))
        high = min(low + draw.choice((1, 8, 100, ROW, 3 * ROW)), len(content))
        for new in (bytes(high - low), draw.randbytes(high - low), b"\xff" * (high - low)):
            damaged = content[:low] + new + content[high:]
            assert (columns(damaged) == good) == (damaged == content)
        assert columns(content[:low]) != good


@pytest.mark.parametrize("size", [8, 512, 4096, 16384, 65536])
def test_places_matter(size):
    """Whatever moves, words or sectors of any disk, between any two places of a piece."""
    draw = random.Random(size)
    content = draw.randbytes(PIECE)
    good = columns(content)
    for _ in range(60):
        one, other = (draw.randrange(PIECE // size) * size for _ in range(2))
        swapped = bytearray(content)
        swapped[one : one + size] = content[other : other + size]
        swapped[other : other + size] = content[one : one + size]
        assert (columns(swapped) == good) == (one == other)
    pieces = [os.urandom(PIECE), os.urandom(PIECE)]
    assert blocks_of(b"".join(pieces), 2 * PIECE) != blocks_of(b"".join(reversed(pieces)), 2 * PIECE)


def test_the_value_is_fixed():
    """Checkpoints outlive the library that wrote them."""
    data = bytes(range(256)) * 40
    assert (columns(data), columns(b""), columns(b"abc")) == (0xBBCE3B9D, 0, 0x352441C2)
