"""Memory of the device and of the host: `see_memory_usage`, and the lines of `memory_breakdown`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host import HostMemory
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished
from deepspeed.log import get_dist_msg, print_dist

_GB = 1024**3
_SHOWN = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


def memory_line() -> str:
    """Allocated and reserved memory of the device, now and at most since the last reset, and of the host."""
    device, host = get_accelerator(), HostMemory()
    used = {
        "MA": device.memory_allocated(),
        "Max_MA": device.max_memory_allocated(),
        "CA": device.memory_reserved(),
        "Max_CA": device.max_memory_reserved(),
    }
    parts = [f"{name} {size / _GB:.2f} GB" for name, size in used.items()]
    total = host.total()
    if total:
        taken = total - host.available()
        parts.append(f"host memory used {taken / _GB:.2f} GB, {100 * taken / total:.1f} %")
    return " | ".join(parts)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Write `message` and the memory in use to standard output on rank 0, and start the peaks anew.

    Calls stay in a script for the day they are needed: without `force` nothing happens.
    """
    if not force or get_dist_msg("") is None:
        return
    print_dist(f"{message} | {memory_line()}")
    get_accelerator().reset_peak_memory_stats()


class MemoryBreakdown:
    """Writes the memory in use before and after forward, backward and step, on rank 0."""

    def __init__(self) -> None:
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream) -> MemoryBreakdown:
        """Start writing; on other ranks than 0 nothing listens."""
        if get_dist_msg("") is not None:
            self._subscriptions.callback(events.subscribe(PhaseBegan, partial(self._show, "before")).close)
            self._subscriptions.callback(events.subscribe(PhaseFinished, partial(self._show, "after")).close)
        return self

    def close(self) -> None:
        """Stop writing."""
        self._subscriptions.close()

    def _show(self, when: str, event: PhaseBegan | PhaseFinished) -> None:
        if event.phase in _SHOWN:
            see_memory_usage(f"{when} {event.phase.value}, micro step {event.micro_step}", force=True)
