"""The CUDA accelerator on a real GPU: streams, events, graphs, memory, page-locked memory, random numbers."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.errors import AcceleratorError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]

MIB = 2**20


@pytest.fixture
def cuda():
    accelerator = CUDA_Accelerator()
    yield accelerator
    accelerator.synchronize()


def test_detection_creates_no_context_and_forking_still_works():
    code = """
import os, torch
from deepspeed.accelerator import get_accelerator
accelerator = get_accelerator()
assert accelerator.device_name() == "cuda", accelerator.device_name()
assert accelerator.is_available() and accelerator.device_count() >= 1
accelerator.visible_devices_envs(), accelerator.communication_backend_name()
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    ok = accelerator.FloatTensor([1.0, 2.0]).sum().item() == 3.0 and torch.cuda.is_initialized()
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
    env = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_device(cuda):
    assert cuda.is_available()
    assert cuda.device_count() == torch.cuda.device_count() >= 1
    cuda.set_device(0)
    assert cuda.current_device() == 0
    assert cuda.current_device_name() == "cuda:0"
    last = cuda.device_count() - 1
    with cuda.device(last):
        assert cuda.current_device() == last
        assert torch.empty(1, device="cuda").device.index == last
    assert cuda.current_device() == 0
    cuda.synchronize(last)
    assert not cuda.is_synchronized_device()
    assert not cuda.use_host_timers()


def test_work_on_a_side_stream_is_ordered_by_waiting(cuda):
    side = cuda.Stream()
    assert isinstance(side, torch.cuda.Stream)
    assert cuda.current_stream() == cuda.default_stream(0) != side
    total = torch.zeros(1, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        assert cuda.current_stream() == side
        torch.cuda._sleep(20_000_000)
        total += 1
    assert cuda.current_stream() == cuda.default_stream()
    cuda.current_stream().wait_stream(side)
    assert (total * 2).item() == 2
    with cuda.stream(None):
        assert cuda.current_stream() == cuda.default_stream()


def test_events_measure_device_time(cuda):
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    cuda.synchronize()
    start.record()
    torch.cuda._sleep(100_000_000)  # tens of milliseconds
    end.record(cuda.current_stream())
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 5


def test_a_graph_is_captured_and_replayed_on_new_values(cuda):
    given = torch.ones(4, device="cuda")
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        given * 3 + 1  # warm up outside of the capture
    cuda.current_stream().wait_stream(side)

    graph = cuda.create_graph()
    assert isinstance(graph, torch.cuda.CUDAGraph)
    assert not cuda.is_current_stream_capturing()
    with cuda.capture_to_graph(graph):
        assert cuda.is_current_stream_capturing()
        result = given * 3 + 1
    assert not cuda.is_current_stream_capturing()
    given.fill_(2)
    cuda.replay_graph(graph)
    assert result.tolist() == [7] * 4
    given.fill_(5)
    cuda.replay_graph(graph)
    assert result.tolist() == [16] * 4

    second = cuda.create_graph()
    with cuda.capture_to_graph(second, pool=graph.pool(), stream=side):
        doubled = result * 2
    cuda.replay_graph(second)
    assert doubled.tolist() == [32] * 4


def test_memory_counts_tensors(cuda):
    cuda.empty_cache()
    before = cuda.memory_allocated()
    free = cuda.available_memory()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert cuda.memory_allocated() - before == 64 * MIB
    assert cuda.memory_allocated(0) == cuda.memory_stats()["allocated_bytes.all.current"]
    assert cuda.max_memory_allocated() >= cuda.memory_allocated()
    assert cuda.memory_reserved() == cuda.memory_cached() >= 64 * MIB
    assert cuda.max_memory_reserved() == cuda.max_memory_cached() >= cuda.memory_reserved()
    assert 32 * MIB < free - cuda.available_memory() < 1024 * MIB
    del block
    assert cuda.memory_allocated() == before
    reserved = cuda.memory_reserved()
    cuda.empty_cache()
    assert cuda.memory_reserved() <= reserved - 64 * MIB


@pytest.mark.parametrize("reset", ["reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"])
def test_a_reset_forgets_the_peak(cuda, reset):
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    peak = cuda.max_memory_allocated()
    del block
    cuda.empty_cache()
    getattr(cuda, reset)()
    assert cuda.max_memory_allocated() <= peak - 64 * MIB
    assert cuda.max_memory_reserved() == cuda.memory_reserved()


def test_memory_of_the_device(cuda):
    total = cuda.total_memory()
    assert total == cuda.total_memory(0) == torch.cuda.get_device_properties(0).total_memory
    assert 0 < cuda.available_memory() <= total
    keep = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    taken = cuda.available_memory()
    del keep  # cached by the allocator: still this process's to use
    assert cuda.available_memory() >= taken + 64 * MIB


def test_dtypes(cuda):
    capability = torch.cuda.get_device_capability()
    assert cuda.is_fp16_supported() == (capability >= (7, 0))
    assert cuda.is_bf16_supported() == torch.cuda.is_bf16_supported()
    for dtype in cuda.supported_dtypes():
        square = torch.full((16, 16), 0.25, dtype=dtype, device="cuda")
        assert (square @ square).unique().tolist() == [1.0]
    assert cuda.is_triton_supported() == (capability >= (7, 0) and find_spec("triton") is not None)
    if capability >= (9, 0) and torch.version.hip is None:
        assert not cuda.prefer_triton_grouped_mm()


def test_random_numbers(cuda):
    cuda.manual_seed(5)
    assert cuda.initial_seed() == 5
    state = cuda.get_rng_state()
    assert state.device.type == "cpu"
    first = torch.rand(8, device="cuda")
    cuda.set_rng_state(state)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    cuda.set_rng_state(state, 0)
    assert torch.equal(cuda.get_rng_state(0), state)
    assert torch.equal(torch.rand(8, device="cuda", generator=cuda.default_generator(0)), first)
    cuda.manual_seed_all(5)
    assert torch.equal(torch.rand(8, device="cuda"), first)


def test_misc(cuda):
    cuda.range_push("step", domain="engine", category="forward")
    cuda.range_pop()
    called = []
    torch.cuda.init()
    cuda.lazy_call(lambda: called.append(1))
    assert called == [1]
    made = cuda.BFloat16Tensor([1, 2])
    assert (made.dtype, made.device.type, made.tolist()) == (torch.bfloat16, "cuda", [1, 2])
    assert cuda.on_accelerator(made)
    assert not cuda.on_accelerator(made.cpu())
    assert cuda.LongTensor([2**40]).item() == 2**40


def test_pinned_tensors(cuda):
    source = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    assert not cuda.is_pinned(source)
    pinned = cuda.pin_memory(source)
    assert cuda.is_pinned(pinned)
    assert torch.equal(pinned, source)
    assert cuda.pin_memory(pinned) is pinned
    flat = cuda.pin_memory(source, match_shape=False)
    assert cuda.is_pinned(flat)
    assert flat.tolist() == list(range(24))
    fresh = cuda.pin_memory(source, make_copy=False)
    assert cuda.is_pinned(fresh)
    assert (fresh.shape, fresh.dtype) == (source.shape, source.dtype)
    turned = cuda.pin_memory(source.t(), match_shape=False)  # not contiguous
    assert turned.tolist() == source.t().reshape(-1).tolist()
    assert cuda.is_pinned(turned)
    cuda.unpin_memory(pinned)

    for made in (cuda.pin_empty(3, 5, dtype=torch.int16), cuda.pin_empty((3, 5), dtype=torch.int16)):
        assert cuda.is_pinned(made)
        assert (made.shape, made.dtype) == ((3, 5), torch.int16)
        assert made.data_ptr() % cuda.pin_memory_alignment() == 0
    like = cuda.pin_empty_like(source, dtype=torch.bfloat16)
    assert cuda.is_pinned(like)
    assert (like.shape, like.dtype) == ((4, 6), torch.bfloat16)

    device = pinned.to("cuda", non_blocking=True)
    fresh.copy_(device * 2, non_blocking=True)
    cuda.synchronize()
    assert torch.equal(fresh, source * 2)


def test_host_memory_is_registered_and_unregistered(cuda):
    pages = torch.frombuffer(mmap.mmap(-1, 4 * MIB), dtype=torch.uint8)
    address = pages.data_ptr()
    assert not pages.is_pinned()
    assert cuda.register_host_memory(address, pages.numel()) is True
    assert pages.is_pinned()
    assert cuda.is_pinned(pages)
    with pytest.raises(AcceleratorError, match="already registered with 4194304 bytes"):
        cuda.register_host_memory(address, pages.numel())
    device = torch.full((4 * MIB,), 7, dtype=torch.uint8, device="cuda")
    pages.copy_(device, non_blocking=True)
    cuda.synchronize()
    assert pages.unique().tolist() == [7]
    assert cuda.unregister_host_memory(address) is True
    assert not pages.is_pinned()
    with pytest.raises(AcceleratorError, match="was not registered"):
        cuda.unregister_host_memory(address)


def test_a_failed_registration_does_not_spoil_later_work(cuda):
    pages = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    beyond = 2**46  # locking so much cannot succeed
    with pytest.raises(AcceleratorError, match="cudaHostRegister failed with error"):
        cuda.register_host_memory(pages.data_ptr(), beyond)
    assert torch.ones(8, device="cuda").sum().item() == 8
    assert cuda.register_host_memory(pages.data_ptr(), mmap.PAGESIZE)
    assert cuda.unregister_host_memory(pages.data_ptr())
