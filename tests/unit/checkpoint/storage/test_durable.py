"""Durable files: whole or as before, and errors that say what to do."""

import errno
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.storage import durable as storage
from deepspeed.checkpoint.storage.block_writer import BLOCK, WriterOptions
from deepspeed.checkpoint.storage.durable import explain, payload, write_file, write_tensorfile, write_text
from deepspeed.errors import CheckpointError


def test_a_tensor_file_loads_with_plain_torch(tmp_path):
    state = {"weight": torch.randn(300, 7), "step": 3, "names": ["a", "b"]}
    state["view"] = state["weight"][5]
    facts = write_tensorfile(tmp_path / "x.pt", state)
    assert facts.size == (tmp_path / "x.pt").stat().st_size
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(loaded["weight"], state["weight"])
    assert loaded["view"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("options", [WriterOptions(), WriterOptions(direct=False)])
def test_a_file_of_several_blocks(tmp_path, options):
    state = {"big": torch.arange(BLOCK // 2, dtype=torch.int32), "small": torch.ones(3)}
    facts = write_tensorfile(tmp_path / "x.pt", state, options)
    assert len(facts.sums) == 3
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(loaded["big"], state["big"])


def test_the_older_format(tmp_path):
    write_tensorfile(tmp_path / "x.pt", {"a": torch.ones(2)}, zipped=False)
    assert (tmp_path / "x.pt").read_bytes()[:2] != b"PK"
    assert torch.load(tmp_path / "x.pt", weights_only=True)["a"].tolist() == [1, 1]


def test_the_switch_of_torch_is_as_before(tmp_path):
    for before in (True, False):
        torch.serialization.set_crc32_options(before)
        try:
            with storage._NO_ZIP_SUMS, storage._NO_ZIP_SUMS:
                assert torch.serialization.get_crc32_options() is False
            assert torch.serialization.get_crc32_options() is before
        finally:
            torch.serialization.set_crc32_options(True)


def test_a_failure_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "x", "old")

    def produce(stream):
        stream.write(b"half of the n")
        raise KeyError("the state changed")

    with pytest.raises(KeyError):
        write_file(tmp_path / "x", produce)
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def limited(path, limit):
    """In a forked child: write a tensor file while the process may not write larger files than `limit`."""
    state = {"a": torch.zeros(100_000)}  # before the fork, which torch's threads do not survive
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write_tensorfile(path, state, WriterOptions(direct=False))
            text = "no error"
        except CheckpointError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    return os.read(read, 10_000).decode()


def test_a_limit_of_the_process_is_an_error_with_the_path(tmp_path):
    write_text(tmp_path / "x.pt", "old")
    text = limited(tmp_path / "x.pt", 4096)
    assert str(tmp_path / "x.pt") in text
    assert "ulimit -f" in text
    assert (tmp_path / "x.pt").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 1 MiB, where this process may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk(tiny_disk):
    write_text(tiny_disk / "x.pt", "old")
    with pytest.raises(CheckpointError) as told:
        write_tensorfile(tiny_disk / "x.pt", {"a": torch.zeros(1_000_000)})
    text = str(told.value)
    assert str(tiny_disk / "x.pt") in text
    assert "needs 3.8 MiB" in text
    assert "No space left" in text
    assert (tiny_disk / "x.pt").read_bytes() == b"old"
    assert os.listdir(tiny_disk) == ["x.pt"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ("needs 2.0 KiB", "Free on its file system")),
        (errno.EACCES, ("user", "owner or mode")),
        (errno.EROFS, ("read-only", "remount")),
        (errno.ENOENT, ("what exists of this path",)),
        (errno.EIO, ("errno 5",)),
    ],
)
def test_errors_say_what_to_do(tmp_path, number, words):
    path = tmp_path / "no" / "x.pt"
    text = str(explain(OSError(number, os.strerror(number)), path, 2048))
    for word in (str(path), *words):
        assert word in text


def test_no_such_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"no/x: No such file.*what exists"):
        write_text(tmp_path / "no" / "x", "text")


def test_text_is_executable_where_wanted(tmp_path):
    write_text(tmp_path / "tool.py", "#!/usr/bin/env python\n", executable=True)
    assert os.access(tmp_path / "tool.py", os.X_OK)
    write_text(tmp_path / "plain", "a")
    assert not Path(tmp_path / "plain").stat().st_mode & 0o111


def test_payload_counts_shared_memory_once():
    base = torch.zeros(100)
    assert payload({"a": base, "b": [base[3:], (base,)], "c": torch.ones(2, dtype=torch.int8)}) == 402
