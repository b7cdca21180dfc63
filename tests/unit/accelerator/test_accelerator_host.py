"""Clock events, process memory and NUMA nodes, read from made-up files and from this machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from deepspeed.accelerator.host import HostEvent, HostMemory, numa_nodes_with_cores
from deepspeed.errors import AcceleratorError

PATIENCE = 600  # seconds: a busy machine is slow, not wrong


def proc(tmp_path, resident=100, mark=100, **meminfo):
    (tmp_path / "self").mkdir(exist_ok=True)
    (tmp_path / "self" / "status").write_text(f"Name:\tpython\nVmHWM:\t {mark} kB\nVmRSS:\t {resident} kB\n")
    (tmp_path / "meminfo").write_text("".join(f"{key}:  {value} kB\n" for key, value in meminfo.items()))
    return tmp_path


def test_memory_numbers_are_bytes_of_the_proc_files(tmp_path):
    memory = HostMemory(proc(tmp_path, resident=7, mark=9, MemTotal=1000, MemAvailable=600))
    assert (memory.resident(), memory.peak()) == (7 * 1024, 9 * 1024)
    assert (memory.total(), memory.available()) == (1000 * 1024, 600 * 1024)


def test_a_peak_after_a_reset_is_not_the_old_high_water_mark(tmp_path):
    memory = HostMemory(proc(tmp_path, resident=10, mark=500))
    assert memory.peak() == 500 * 1024
    memory.reset_peak()
    assert memory.peak() == 10 * 1024
    proc(tmp_path, resident=40, mark=500)  # grew, below the old mark
    assert memory.peak() == 40 * 1024
    proc(tmp_path, resident=20, mark=500)
    assert memory.peak() == 40 * 1024
    proc(tmp_path, resident=30, mark=700)  # a spike between two calls, told by the kernel
    assert memory.peak() == 700 * 1024


def test_memory_without_proc_comes_from_the_system_calls(tmp_path):
    memory = HostMemory(tmp_path / "nowhere")
    assert memory.resident() > 2**20
    assert memory.peak() >= memory.resident() > 0
    assert memory.total() >= memory.available() > 0


def test_this_machine():
    memory = HostMemory()
    assert 2**20 < memory.resident() <= memory.peak() < memory.total()
    assert 0 < memory.available() <= memory.total()


def test_growth_is_seen():
    memory = HostMemory()
    before = memory.resident()
    block = bytearray(b"x") * (64 * 2**20)
    assert memory.resident() - before > 50 * 2**20
    del block
    assert memory.peak() - before > 50 * 2**20


def test_numa_nodes_without_cores_do_not_count(tmp_path):
    for node, cores in (("node0", "0-3\n"), ("node1", "4-7\n"), ("node2", "\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    (tmp_path / "power").mkdir()
    assert numa_nodes_with_cores(tmp_path) == 2
    assert numa_nodes_with_cores(tmp_path / "nowhere") == 0


def test_an_event_measures_host_time():
    start, end = HostEvent(enable_timing=True), HostEvent(enable_timing=True)
    start.record()
    end.record(None)
    end.wait()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_milliseconds(monkeypatch):
    times = iter((1_000_000, 3_500_000))
    monkeypatch.setattr("deepspeed.accelerator.host.time.perf_counter_ns", lambda: next(times))
    start, end = HostEvent(), HostEvent()
    start.record()
    end.record()
    assert start.elapsed_time(end) == 2.5


@pytest.mark.parametrize("which", ["start", "end"])
def test_an_event_that_was_not_recorded_is_named(which):
    start, end = HostEvent(), HostEvent()
    (end if which == "start" else start).record()
    with pytest.raises(AcceleratorError, match=f"the {which} event was never recorded"):
        start.elapsed_time(end)


def test_an_event_between_processes_is_refused():
    with pytest.raises(AcceleratorError, match="interprocess"):
        HostEvent(interprocess=True)


STEPS = """
import ctypes, sys, torch
from deepspeed.accelerator.host import keep_heap

libc = ctypes.CDLL(None)
call = getattr(libc, "mallinfo2", None) or libc.mallinfo  # before glibc 2.33, with smaller numbers
number = ctypes.c_size_t if hasattr(libc, "mallinfo2") else ctypes.c_int
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
call.restype = type("Info", (ctypes.Structure,), {"_fields_": [(name, number) for name in names.split()]})

def taken():
    found = call()
    return found.arena + found.hblkhd  # bytes that malloc has from the system

def step():
    held = [torch.zeros(1 << 20) for _ in range(8)]  # 4 MiB each
    return taken()

if sys.argv[1] == "kept":
    keep_heap()
before = taken()
during = [step() for _ in range(3)][-1]
print(during - before, taken() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another malloc")
def test_memory_that_steps_take_again_is_kept():
    def bytes_of(how, **variables):
        """What malloc takes from the system for a step, and what of it is left after the last."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
        done = subprocess.run(
            [sys.executable, "-c", STEPS, how], env=env, capture_output=True, text=True, check=True, timeout=PATIENCE
        )
        return [int(word) for word in done.stdout.split()[-2:]]

    tensors = 8 * (4 << 20)
    # What malloc does by itself depends on blocks that imports have freed: only a fixed limit always gives memory back.
    fixed = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    during, after = bytes_of("given back", **fixed)
    if during < tensors:  # as in torch's wheels for aarch64
        pytest.skip("torch takes the memory of tensors from an allocator of its own")
    assert after < tensors // 8
    during, after = bytes_of("kept")
    assert after > tensors * 7 // 8, "memory was given back to the system"
    during, after = bytes_of("kept", **fixed)
    assert after < tensors // 8, "what the user sets does not count"
