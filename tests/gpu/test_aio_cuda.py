"""File handles and locked memory beside a GPU: registered with CUDA, tensors of the device, GPUDirect Storage."""

from __future__ import annotations

import gc

import pytest
import torch

from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.errors import FileError
from deepspeed.io import ds_io
from deepspeed.ops.capability import has_gds
from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]


@pytest.fixture
def handle():
    return AsyncIOBuilder().load().aio_handle(2**20, 8, False, True, 2)


def test_locked_memory_is_pinned_for_cuda_until_it_is_freed(handle):
    tensor = handle.new_cpu_locked_tensor(2**20 + 1, torch.empty(0, dtype=torch.bfloat16))
    assert tensor.is_pinned()
    assert tensor[5:].is_pinned()
    assert handle.is_pinned(tensor)
    assert handle.is_pinned(torch.ones(3).pin_memory())
    assert torch.equal(tensor.fill_(3).to("cuda", non_blocking=True).cpu(), tensor)
    assert handle.free_cpu_locked_tensor(tensor)
    assert not tensor.is_pinned()
    for _ in range(20):  # addresses come again: what is forgotten would be registered twice
        assert handle.is_pinned(handle.new_cpu_locked_tensor(2**20, torch.empty(0)))
        gc.collect()


@pytest.mark.parametrize("size", [1, 4096, 3 * 2**20 + 5])
def test_tensors_of_the_device_go_to_files_and_back(handle, tmp_path, size):
    path = str(tmp_path / "file")
    given = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    got = torch.zeros_like(given)
    assert handle.sync_pwrite(given, path) == 1
    assert handle.async_pread(got, path) == 0
    assert handle.wait() == 1
    assert torch.equal(got, given)
    with pytest.raises(FileError, match="ends at byte"):
        handle.sync_pread(torch.zeros(size + 1, dtype=torch.uint8, device="cuda"), path)


def test_a_disk_is_measured_from_the_device(tmp_path, capsys):
    for words in ([], ["--read"], ["--slow_bounce_buffer"], ["--use_accelerator_pin_memory"]):
        assert ds_io.main(["--folder", str(tmp_path), "--io_size", "4M", "--gpu", "--validate", *words]) == 0
    assert capsys.readouterr().out.count("GB/s") == 4


@pytest.mark.skipif(not has_gds.holds, reason="GPUDirect Storage is not installed")
def test_gpudirect_storage(tmp_path):
    handle = GDSBuilder().load().gds_handle(2**20, 8, False, True, 2)
    pinned = handle.new_pinned_device_tensor(2**18, torch.empty(0))
    for given in (pinned.normal_(), torch.randn(2**18, device="cuda"), torch.randn(2**19, device="cuda")[: 2**18]):
        got = torch.zeros_like(given)
        handle.sync_pwrite(given, str(tmp_path / "file"))
        assert handle.async_pread(got, str(tmp_path / "file")) == 0
        assert handle.wait() == 1
        assert torch.equal(got, given)
    assert handle.free_pinned_device_tensor(pinned)
    assert not handle.free_pinned_device_tensor(pinned)
    with pytest.raises(FileError, match="file has"):
        handle.sync_pread(torch.zeros(2**19, device="cuda"), str(tmp_path / "file"))
