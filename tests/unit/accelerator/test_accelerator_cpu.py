"""The whole contract, exercised on the CPU."""

from __future__ import annotations

import logging
import mmap
import sys
import types

import pytest
import torch

from deepspeed.accelerator import cpu as home
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.errors import AcceleratorError


@pytest.fixture
def cpu(monkeypatch):
    for variable in ("LOCAL_SIZE", "LOCAL_RANK", "DS_PIN_MEMORY_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
    return CPU_Accelerator()


def test_nature(cpu):
    assert cpu.is_synchronized_device()
    assert cpu.use_host_timers()
    assert cpu.resolves_data_dependency()
    assert cpu.handles_memory_backpressure()


def test_device(cpu, monkeypatch):
    assert cpu.is_available()
    assert cpu.device_name() == cpu.device_name(3) == cpu.current_device_name() == "cpu"
    assert cpu.current_device() == 0
    cpu.set_device(1)
    with cpu.device(1), cpu.device():
        cpu.synchronize()
        cpu.synchronize(0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert cpu.current_device() == 2


def test_device_count(cpu, monkeypatch):
    monkeypatch.setattr(home, "numa_nodes_with_cores", lambda: 4)
    assert cpu.device_count() == 4
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert cpu.device_count() == 3
    monkeypatch.setenv("LOCAL_SIZE", "0")
    assert cpu.device_count() == 4
    monkeypatch.setattr(home, "numa_nodes_with_cores", lambda: 0)
    assert cpu.device_count() == 1


@pytest.mark.parametrize("stray", ["many", "-1", "²", "9" * 5000])
def test_a_stray_device_count_is_told_and_left_alone(cpu, monkeypatch, caplog, stray):
    monkeypatch.setattr(home, "numa_nodes_with_cores", lambda: 4)
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    monkeypatch.setenv("LOCAL_SIZE", stray)
    assert cpu.device_count() == 4
    assert "is not used" in caplog.text


def test_a_device_number_that_is_none_is_an_error(cpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(AcceleratorError, match="LOCAL_RANK='first'"):
        cpu.current_device()


def test_random_numbers(cpu):
    outside = torch.get_rng_state()
    assert cpu.random() is torch.random
    cpu.manual_seed(11)
    assert cpu.initial_seed() == 11
    state = cpu.get_rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state, 0)
    assert torch.equal(torch.rand(4), first)
    cpu.manual_seed_all(11)
    assert torch.equal(torch.rand(4), first)
    cpu.manual_seed(11)
    assert torch.equal(torch.rand(4, generator=cpu.default_generator(0)), first)
    torch.set_rng_state(outside)


def test_streams_are_nothing_and_events_are_clocks(cpu):
    assert cpu.Stream is None
    assert cpu.current_stream() is cpu.default_stream(0) is None
    with cpu.stream(cpu.current_stream()), cpu.stream(object()):
        start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
        start.record(cpu.current_stream())
        end.record()
    assert start.elapsed_time(end) >= 0


def take(size):
    """Resident memory that is certainly given back at `close()`, unlike that of an allocator."""
    block = mmap.mmap(-1, size)
    block.write(b"x" * size)
    return block


def test_memory(cpu):
    cpu.empty_cache()
    resident = cpu.memory_allocated()
    assert resident > 2**20
    block = take(64 * 2**20)
    assert cpu.memory_allocated() - resident > 50 * 2**20
    assert cpu.memory_reserved(0) - resident > 50 * 2**20
    block.close()
    assert cpu.max_memory_allocated() - resident > 50 * 2**20
    stats = cpu.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    assert stats["reserved_bytes.all.peak"] >= stats["reserved_bytes.all.current"] > 0
    assert cpu.max_memory_cached() == cpu.max_memory_reserved() >= cpu.memory_cached() > 0
    assert cpu.total_memory() > cpu.available_memory() > 0


@pytest.mark.parametrize("reset", ["reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"])
def test_a_reset_forgets_the_peak(cpu, reset):
    block = take(64 * 2**20)
    peak = cpu.max_memory_allocated()
    block.close()
    getattr(cpu, reset)()
    assert cpu.max_memory_allocated() < peak - 50 * 2**20


def test_dtypes(cpu):
    assert cpu.is_bf16_supported()
    assert cpu.is_fp16_supported()
    assert cpu.is_fp64_supported()
    assert set(cpu.supported_dtypes()) == {torch.float32, torch.float16, torch.bfloat16, torch.float64}
    for dtype in cpu.supported_dtypes():
        square = torch.full((4, 4), 0.5, dtype=dtype)
        assert (square @ square).unique().tolist() == [1.0]


def test_misc(cpu):
    cpu.range_push("step", domain="engine", category="forward")
    cpu.range_pop(domain="engine")
    called = []
    cpu.lazy_call(lambda: called.append(1))
    assert called == [1]
    assert not cpu.is_triton_supported()
    assert not cpu.prefer_triton_grouped_mm()


def test_graphs_are_nothing_and_the_work_simply_runs(cpu):
    graph = cpu.create_graph()
    assert graph is None
    total = torch.zeros(1)
    with cpu.capture_to_graph(graph, pool=None, stream=None):
        total += 1
        assert not cpu.is_current_stream_capturing()
    cpu.replay_graph(graph)
    assert total.item() == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("BFloat16Tensor", torch.bfloat16),
        ("ByteTensor", torch.uint8),
        ("DoubleTensor", torch.float64),
        ("FloatTensor", torch.float32),
        ("HalfTensor", torch.float16),
        ("IntTensor", torch.int32),
        ("LongTensor", torch.int64),
    ],
)
def test_tensors(cpu, name, dtype):
    made = getattr(cpu, name)([1, 2])
    assert made.dtype == dtype
    assert made.tolist() == [1, 2]
    assert cpu.on_accelerator(made)
    assert not cpu.on_accelerator(torch.empty(1, device="meta"))


def test_pinning_is_the_tensor_itself(cpu, monkeypatch):
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")  # a question of devices that need pinning
    tensor = torch.arange(6).reshape(2, 3)
    assert cpu.pin_memory(tensor) is tensor
    flat = cpu.pin_memory(tensor, match_shape=False)
    assert flat.shape == (6,)
    assert flat.data_ptr() == tensor.data_ptr()
    assert not cpu.is_pinned(tensor)
    cpu.unpin_memory(tensor)
    for made in (cpu.pin_empty(2, 3, dtype=torch.int8), cpu.pin_empty((2, 3), dtype=torch.int8)):
        assert (made.shape, made.dtype) == ((2, 3), torch.int8)
        assert made.data_ptr() % cpu.pin_memory_alignment() == 0
    assert cpu.pin_empty_like(tensor).dtype == torch.int64
    like = cpu.pin_empty_like(tensor, dtype=torch.float16)
    assert (like.shape, like.dtype) == ((2, 3), torch.float16)
    assert cpu.register_host_memory(tensor.data_ptr(), 48) is False
    assert cpu.unregister_host_memory(tensor.data_ptr()) is False


def test_backend_is_gloo_or_ccl_if_that_can_be_imported(monkeypatch, caplog):
    monkeypatch.setattr(home, "find_spec", lambda name: None)
    assert CPU_Accelerator().communication_backend_name() == "gloo"
    monkeypatch.setattr(home, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "oneccl_bindings_for_pytorch", types.ModuleType("oneccl_bindings_for_pytorch"))
    assert CPU_Accelerator().communication_backend_name() == "ccl"
    monkeypatch.setitem(sys.modules, "oneccl_bindings_for_pytorch", None)  # importing raises
    assert CPU_Accelerator().communication_backend_name() == "gloo"


@pytest.mark.slow
def test_compile_backend(cpu):
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match=r"backend 'inductr' is unknown.*inductor"):
        cpu.set_compile_backend("inductr")
    assert cpu.get_compile_backend() == "eager"
    assert CPU_Accelerator().get_compile_backend() == "inductor"
