"""What the host tells about itself: a clock that looks like device events, memory, NUMA nodes."""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deepspeed.errors import AcceleratorError

# The largest block by which glibc learns what is large: up to 32 MiB, with what it adds to a block.
_LARGEST = (32 << 20) - (64 << 10)


@cache
def keep_heap() -> None:
    """Let malloc keep some 64 MiB that a step frees, which the next one takes again.

    glibc returns what is free at the end of its heap to the system, beyond twice the largest block that it mapped and
    saw freed; a step of smaller tensors faults in its pages anew, for up to a fifth of its time. One large block, freed
    here, is what larger models do by themselves. MALLOC_ variables of the user's win over this. Where torch has an
    allocator of its own, as in its wheels for aarch64, this changes nothing.
    """
    torch.empty(_LARGEST, dtype=torch.uint8)


class HostEvent:
    """An event on a device whose work is done when the call returns: the host's clock is the device's."""

    __slots__ = ("_time_ns",)

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise AcceleratorError("an event of the CPU cannot be shared between processes; drop interprocess=True")
        self._time_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Remember the time."""
        self._time_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: all work before the event is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to `end_event`."""
        if self._time_ns is None or end_event._time_ns is None:
            which = "start" if self._time_ns is None else "end"
            raise AcceleratorError(f"the {which} event was never recorded; call record() on both events first")
        return (end_event._time_ns - self._time_ns) / 1e6


def _kilobytes(path: Path) -> dict[str, int]:
    """The `Name:  123 kB` lines of a proc file, in bytes; empty where the system has no such file."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {w[0]: int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB" and w[1].isdigit()}


def _pages(name: str) -> int:
    """A page count of the system, in bytes; 0 where the system does not tell."""
    if os.name != "posix" or name not in os.sysconf_names:
        return 0
    return max(0, os.sysconf(name) * os.sysconf("SC_PAGE_SIZE"))


def _highest_resident() -> int:
    """Peak resident set of the process from resource usage, for systems without /proc; 0 if unknown."""
    if os.name != "posix":
        return 0
    import resource  # posix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class HostMemory:
    """Resident memory of this process and memory of the machine, in bytes; 0 where the system does not tell."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._status = proc / "self" / "status"
        self._meminfo = proc / "meminfo"
        self._seen = 0
        self._mark_at_reset = 0

    def resident(self) -> int:
        """Bytes of this process that lie in memory now."""
        return _kilobytes(self._status).get("VmRSS") or _highest_resident()

    def peak(self) -> int:
        """Most resident bytes since the last reset: exact if it is a new high of the process, else as seen here."""
        status = _kilobytes(self._status)
        now = status.get("VmRSS") or _highest_resident()
        # The kernel's high-water mark cannot be set back, but if it rose after the reset it is the new peak.
        mark = status.get("VmHWM", 0)
        self._seen = max(self._seen, now, mark if mark > self._mark_at_reset else 0)
        return self._seen

    def reset_peak(self) -> None:
        """Start the peak anew at what is resident now."""
        status = _kilobytes(self._status)
        self._mark_at_reset = status.get("VmHWM", 0)
        self._seen = status.get("VmRSS") or _highest_resident()

    def total(self) -> int:
        """Bytes of memory in this machine."""
        return _kilobytes(self._meminfo).get("MemTotal") or _pages("SC_PHYS_PAGES")

    def available(self) -> int:
        """Bytes that can still be allocated without swapping."""
        told = _kilobytes(self._meminfo).get("MemAvailable") or _pages("SC_AVPHYS_PAGES")
        return told or max(0, self.total() - self.resident())


def numa_nodes_with_cores(root: Path = Path("/sys/devices/system/node")) -> int:
    """Number of NUMA nodes that have at least one core; 0 where the system does not tell."""
    count = 0
    for cores in root.glob("node[0-9]*/cpulist"):
        try:
            count += bool(cores.read_text(encoding="ascii").strip())
        except OSError:
            continue
    return count
