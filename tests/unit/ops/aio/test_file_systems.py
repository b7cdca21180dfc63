"""Other file systems: one that is full, one without O_DIRECT, folders that nobody may write to."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess

import pytest
import torch

from deepspeed.errors import FileError
from deepspeed.log import logger, warn_once
from deepspeed.ops.aio import FileEngine
from deepspeed.ops.aio.plan import ALIGNMENT


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a file system of a kind on a folder of the test's own."""
    folders = []

    def mount(kind: str, options: str = "rw"):
        folder = tmp_path / kind
        folder.mkdir()
        done = subprocess.run(["mount", "-t", kind, "-o", options, "none", str(folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a {kind} is not permitted here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def engine():
    with FileEngine(block_size=ALIGNMENT, queue_depth=2, threads=2) as made:
        yield made


def failure(ticket) -> FileError:
    with pytest.raises(FileError) as caught:
        ticket.wait()
    return caught.value


def test_a_full_disk_is_told_with_numbers_and_nothing_is_taken(engine, mounted):
    folder = mounted("tmpfs", "size=1m")
    engine.write(folder / "fits", torch.ones(2**18, dtype=torch.uint8)).wait()
    error = failure(engine.write(folder / "file", torch.ones(2**20, dtype=torch.uint8)))
    assert error.errno == errno.ENOSPC
    assert "write of 1048576 bytes at offset 0: No space left on device: 1048576 bytes are needed" in str(error)
    assert (folder / "file").stat().st_blocks == 0
    engine.write(folder / "file", torch.ones(2**18, dtype=torch.uint8)).wait()  # what fits still does


def test_a_disk_that_fills_up_meanwhile_is_told(engine, mounted, monkeypatch):
    folder = mounted("tmpfs", "size=1m")
    monkeypatch.setattr("deepspeed.ops.aio.open_file._grow", lambda *_: None)
    tickets = [engine.write(folder / f"{n}", torch.ones(2**19, dtype=torch.uint8)) for n in range(4)]
    failed = []
    for n, ticket in enumerate(tickets):
        try:
            ticket.wait()
        except FileError as error:
            failed.append((error.errno, error.filename == str(folder / f"{n}")))
    assert failed
    assert set(failed) == {(errno.ENOSPC, True)}


def test_a_folder_that_is_read_only_is_named(engine, mounted):
    folder = mounted("tmpfs", "ro")
    error = failure(engine.write(folder / "file", torch.ones(3)))
    assert (error.errno, error.filename) == (errno.EROFS, str(folder / "file"))


def refuse_at_open(monkeypatch):
    """The file system of long ago: O_DIRECT is no flag of its files."""
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr("deepspeed.ops.aio.open_file.os.open", refuse)


def refuse_at_use(monkeypatch):
    """One that takes the flag and finds out late that it cannot."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def refuse(descriptor, views, offset, real=real):
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(descriptor, views, offset)

        monkeypatch.setattr(f"deepspeed.ops.aio.open_file.os.{name}", refuse)


@pytest.mark.parametrize("how", [refuse_at_open, refuse_at_use])
def test_without_direct_access_bytes_arrive_and_it_is_told_once(engine, tmp_path, monkeypatch, how):
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    warn_once.cache_clear()
    how(monkeypatch)
    try:
        tensor = torch.randint(0, 256, (5 * ALIGNMENT + 3,), dtype=torch.uint8)
        for n in range(3):
            got = torch.zeros_like(tensor)
            engine.write(tmp_path / f"{n}", tensor, n).wait()
            engine.read(tmp_path / f"{n}", got, n).wait()
            assert torch.equal(got, tensor)
    finally:
        logger.removeHandler(handler)
    assert len(said) == 1
    assert str(tmp_path) in said[0]
    assert "O_DIRECT" in said[0]


def test_one_without_a_limit_and_without_direct_access_works(engine, mounted):
    folder = mounted("ramfs")
    tensor = torch.randint(0, 256, (5 * ALIGNMENT + 3,), dtype=torch.uint8)
    got = torch.zeros_like(tensor)
    engine.write(folder / "file", tensor, 5).wait()
    engine.read(folder / "file", got, 5).wait()
    assert torch.equal(got, tensor)
