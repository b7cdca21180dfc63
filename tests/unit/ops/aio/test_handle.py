"""The public handles: their numbers, their returns, several requests before one wait, locked memory."""

from __future__ import annotations

import errno
import gc
import inspect
import re

import pytest
import torch

from deepspeed.errors import FileError, UsageError
from deepspeed.ops.aio import AsyncIOBuilder, open_file
from deepspeed.ops.op_builder import PinMemoryBuilder

OP = AsyncIOBuilder().load()
BYTE = torch.empty(0, dtype=torch.uint8)


@pytest.fixture
def handle():
    return OP.aio_handle(2**20, 4, False, True, 2)


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def locked_kibibytes() -> int:
    with open("/proc/self/status") as file:
        return int(re.search(r"VmLck:\s+(\d+)", file.read())[1])


def test_the_numbers_are_those_given_and_the_published_defaults():
    made = OP.aio_handle(4096, 3, True, True, 5)
    asked = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    assert [getattr(made, f"get_{name}")() for name in asked] == [4096, 3, True, True, 5]
    assert list(inspect.signature(OP.aio_handle).parameters) == list(asked)
    made = OP.aio_handle()
    assert [getattr(made, f"get_{name}")() for name in asked] == [2**20, 128, False, False, 1]
    assert made.get_alignment() % 512 == 0
    with pytest.raises(UsageError, match="queue_depth is 0"):
        OP.aio_handle(queue_depth=0)


def test_a_descriptor_that_is_compared_stays_open_and_where_it_was(handle, tmp_path):
    given, out = noise(5000), torch.empty(5000, dtype=torch.uint8)
    with open(tmp_path / "file", "wb+") as file:
        handle.write(given, file.fileno(), validate=True)
        handle.read(out, file.fileno(), validate=True)
        assert file.tell() == 0
        assert file.read() == given.numpy().tobytes() == out.numpy().tobytes()


@pytest.mark.parametrize("size", [0, 1, 1001, 2**16, 3 * 2**20 + 5])
def test_every_way_to_write_and_read(handle, tmp_path, size):
    path = str(tmp_path / "file")
    ways = [
        (lambda given: handle.write(given, path, True), lambda out: handle.read(out, path, True), 0),
        (lambda given: handle.pwrite(given, path, True, False), lambda out: handle.pread(out, path, True, False), 1),
        (lambda given: handle.sync_pwrite(given, path, 512), lambda out: handle.sync_pread(out, path, 512), 1),
        (lambda given: handle.async_pwrite(given, path), lambda out: handle.async_pread(out, path), 0),
        (lambda given: handle.pwrite(given, path, True, True), lambda out: handle.pread(out, path, True, True), 0),
    ]
    for write, read, answer in ways:
        given, out = noise(size), torch.empty(size, dtype=torch.uint8)
        assert write(given) == answer
        handle.wait()
        assert read(out) == answer
        handle.wait()
        assert torch.equal(given, out)


def test_the_functions_without_a_handle(tmp_path):
    given, out, copied = noise(5000), noise(5000), noise(5000)
    options = (2**20, 8, False, True, True)
    assert OP.aio_write(given, str(tmp_path / "file"), *options) == 0
    assert OP.aio_read(out, str(tmp_path / "file"), *options) == 0
    assert OP.deepspeed_memcpy(copied, out) == 0
    assert torch.equal(copied, given)


def test_wait_counts_what_was_begun(handle, tmp_path):
    tensors = [noise(10_000) for _ in range(5)]
    for n, tensor in enumerate(tensors):
        assert handle.async_pwrite(tensor, str(tmp_path / f"{n}")) == 0
    assert handle.wait() == 5
    assert handle.wait() == 0
    assert all((tmp_path / f"{n}").read_bytes() == bytes(tensor.tolist()) for n, tensor in enumerate(tensors))


def test_a_failure_does_not_leave_others_behind(handle, tmp_path):
    handle.async_pread(noise(10), str(tmp_path / "gone"))
    handle.async_pwrite(noise(10), str(tmp_path / "file"))
    with pytest.raises(FileError, match="gone"):
        handle.wait()
    assert handle.wait() == 0
    assert (tmp_path / "file").stat().st_size == 10
    with pytest.raises(FileError):
        handle.sync_pread(noise(11), str(tmp_path / "file"))


def test_validate_finds_other_bytes(handle, tmp_path):
    path = tmp_path / "file"
    handle.pwrite(noise(5000), str(path), True, True)
    handle._pending[0].wait()
    path.write_bytes(b"x" * 5000)
    with pytest.raises(FileError, match="a plain read finds other bytes between 0 and 5000") as caught:
        handle.wait()
    assert caught.value.errno == errno.EIO


def test_locked_memory_begins_with_a_page_and_is_unlocked_in_time(handle):
    gc.collect()  # as below
    before = locked_kibibytes()
    tensor = handle.new_cpu_locked_tensor(300_000, torch.empty(0, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((300_000,), torch.bfloat16, "cpu")
    assert tensor.data_ptr() % handle.get_alignment() == 0
    assert not tensor.any()
    if not handle.is_pinned(tensor):
        pytest.skip("this user may not lock memory")
    assert locked_kibibytes() >= before + 585
    assert handle.is_pinned(tensor[100:200])
    assert not handle.is_pinned(torch.ones(3))
    assert PinMemoryBuilder().load().pin_handle().is_pinned(tensor)
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(tensor) is False
    assert not handle.is_pinned(tensor)
    tensor.fill_(1)  # unlocked, not gone
    assert locked_kibibytes() == before


def test_locked_memory_that_nobody_holds_is_given_back(handle):
    gc.collect()  # what an earlier test left is not given back while this one looks
    before = locked_kibibytes()
    view = handle.new_cpu_locked_tensor(2**20, BYTE)[5:]
    gc.collect()
    if not handle.is_pinned(view):
        pytest.skip("this user may not lock memory")
    assert locked_kibibytes() > before
    del view
    gc.collect()
    assert locked_kibibytes() == before


def test_the_empty_tensor_and_a_negative_one(handle):
    assert handle.new_cpu_locked_tensor(0, BYTE).numel() == 0
    with pytest.raises(UsageError, match="-1 elements"):
        handle.new_cpu_locked_tensor(-1, BYTE)


def test_where_memory_may_not_be_locked_it_is_told_and_works(handle, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(open_file, "warn_once", said.append)
    monkeypatch.setattr(open_file.ctypes, "CDLL", lambda *_, **__: type("Libc", (), {"mlock": lambda *_: -1}))
    tensor = handle.new_cpu_locked_tensor(100, BYTE)
    assert not handle.is_pinned(tensor)
    assert "ulimit -l" in said[0]
    handle.sync_pwrite(tensor, str(tmp_path / "file"))
    assert not handle.free_cpu_locked_tensor(tensor)


def test_a_pin_handle_frees_by_address():
    handle = PinMemoryBuilder().load().pin_handle()
    tensor = handle.new_cpu_locked_tensor(100, BYTE)
    if not handle.is_pinned(tensor):
        pytest.skip("this user may not lock memory")
    assert handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
    assert not handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
