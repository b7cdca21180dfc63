"""Clock events, process memory and NUMA nodes, read from made-up files and from this machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from deepspeed.accelerator.host import HostEvent, HostMemory, numa_nodes_with_cores
from deepspeed.errors import AcceleratorError


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
import resource, sys, torch
from deepspeed.accelerator.host import keep_heap
if sys.argv[1] == "kept":
    keep_heap()
def step():
    held = [torch.zeros(1 << 20) for _ in range(8)]  # 4 MiB each
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another malloc")
def test_memory_that_steps_take_again_is_kept():
    def faults(how, **variables):
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
        done = subprocess.run(
            [sys.executable, "-c", STEPS, how], env=env, capture_output=True, text=True, check=True, timeout=120
        )
        return int(done.stdout.split()[-1])

    pages = 10 * 8 * (4 << 20) // os.sysconf("SC_PAGE_SIZE")
    # What malloc does by itself depends on blocks that imports have freed: only a fixed limit always gives memory back.
    fixed = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    assert faults("given back", **fixed) > pages // 2, "no page is counted"
    assert faults("kept") < pages // 20, "pages were taken from the system again"
    assert faults("kept", **fixed) > pages // 2, "what the user sets does not count"
