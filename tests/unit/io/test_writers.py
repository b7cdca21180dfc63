"""Writers of files: torch.save through each gives what torch.load reads; errors of the disk surface at close."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import FileError, UsageError
from deepspeed.io import FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter
from deepspeed.ops.op_builder import AsyncIOBuilder

PAGE = os.sysconf("SC_PAGE_SIZE")


def fast(path, *, pages=4, double_buffer=True):
    handle = AsyncIOBuilder().load().aio_handle(PAGE, 2, False, True, 2)
    memory = handle.new_cpu_locked_tensor(pages * PAGE, torch.empty(0, dtype=torch.uint8))
    return FastFileWriter(str(path), FastFileWriterConfig(handle, memory, double_buffer))


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("make", [PyFileWriter, fast, lambda path: fast(path, double_buffer=False)])
def test_torch_loads_what_torch_saved(tmp_path, make, new_format):
    saved = {"a": torch.randn(70_001), "b": torch.arange(3, dtype=torch.bfloat16), "c": ["d", 1]}
    with make(tmp_path / "file") as writer:
        torch.save(saved, writer, _use_new_zipfile_serialization=new_format)
    got = torch.load(tmp_path / "file")
    assert torch.equal(got["a"], saved["a"])
    assert torch.equal(got["b"], saved["b"])
    assert got["c"] == saved["c"]
    assert writer.file_path() == str(tmp_path / "file")


@given(pieces=st.lists(st.binary(max_size=3 * PAGE), max_size=20), pages=st.integers(2, 5), double=st.booleans())
def test_every_byte_arrives_in_order(tmp_path_factory, pieces, pages, double):
    path = tmp_path_factory.mktemp("writer") / "file"
    path.write_bytes(b"longer, and from before" * 5000)
    writer = fast(path, pages=pages, double_buffer=double)
    assert [writer.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
    writer.close()
    writer.close()
    assert path.read_bytes() == b"".join(pieces)


def test_a_mock_makes_no_file(tmp_path):
    writer = MockFileWriter(str(tmp_path / "file"))
    torch.save(torch.ones(1000), writer)
    writer.close()
    assert writer.size > 4000
    assert not (tmp_path / "file").exists()


def test_an_error_of_the_disk_surfaces_at_close(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deepspeed.ops.aio.open_file._grow", full)
    writer = fast(tmp_path / "file")
    torch.save(torch.ones(100_000), writer)
    with pytest.raises(FileError, match="No space left") as caught:
        writer.close()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    with pytest.raises(UsageError, match="closed"):
        writer.write(b"more")


def test_a_file_that_cannot_be_made_is_told_at_once(tmp_path):
    for make in (PyFileWriter, fast):
        with pytest.raises(FileNotFoundError):
            make(tmp_path / "gone" / "file")


def test_a_config_that_cannot_work_is_refused(tmp_path):
    handle = AsyncIOBuilder().load().aio_handle()
    with pytest.raises(UsageError, match=f"has {2 * PAGE - 1} bytes; expected at least {2 * PAGE}"):
        FastFileWriter(
            str(tmp_path / "file"), FastFileWriterConfig(handle, torch.empty(2 * PAGE - 1, dtype=torch.uint8))
        )
    with pytest.raises(UsageError, match="writer 1 of 2"):
        FastFileWriterConfig(handle, torch.empty(2**20), num_parallel_writers=2, writer_rank=1)
    assert not (tmp_path / "file").exists()
