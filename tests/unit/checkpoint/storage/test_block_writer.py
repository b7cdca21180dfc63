"""Streams: whatever the pieces, the file holds the bytes and the sums are those of its blocks."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.storage import block_writer as streams
from deepspeed.checkpoint.storage.block_writer import Stream, WriterOptions, columns

BLOCK = 4096 * 4


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", BLOCK)
    monkeypatch.setattr(streams, "_PIECE", 5000)


@pytest.mark.parametrize(
    "options", [WriterOptions(), WriterOptions(direct=False), WriterOptions(direct=False, depth=1)]
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.sampled_from([0, 1, 30, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 77]), max_size=6))
def test_bytes_and_sums(small_blocks, tmp_path, options, sizes):
    parts = [os.urandom(size) for size in sizes]
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    stream = Stream(descriptor, options)
    for part in parts:
        assert stream.write(part) == len(part)
    facts = stream.finish()
    os.close(descriptor)
    data = b"".join(parts)
    assert path.read_bytes() == data
    assert facts.size == len(data)
    assert facts.sums == tuple(columns(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_the_first_error_is_raised_at_the_end(small_blocks, tmp_path, monkeypatch, direct, whole):
    written = []

    def full(descriptor, view, start):
        written.append(start)
        if start >= 2 * BLOCK:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(streams, "_write_at", full)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    stream = Stream(descriptor, WriterOptions(direct=direct))
    if whole:
        stream.write(bytes(40 * BLOCK))
    else:
        for _ in range(200):
            stream.write(bytes(BLOCK // 5))
    with pytest.raises(OSError, match="No space left"):
        stream.finish()
    os.close(descriptor)
    assert len(written) <= 3 + WriterOptions().depth, "after the first error nothing more is tried"


def test_mock_writes_nothing(small_blocks, tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    stream = Stream(descriptor, WriterOptions(discard=True))
    stream.write(bytes(3 * BLOCK + 5))
    assert stream.tell() == 3 * BLOCK + 5
    facts = stream.finish()
    os.close(descriptor)
    assert facts.size == 3 * BLOCK + 5
    assert (tmp_path / "file").stat().st_size == 0
