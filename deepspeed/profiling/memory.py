"""Memory of the device and of the host: `see_memory_usage`, and the lines of `memory_breakdown`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host import HostMemory
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished
from deepspeed.log import get_dist_msg, print_dist

_GB = 1024**3
_SHOWN = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


def memory_now(device_index: int | None = None) -> dict[str, int]:
    """Bytes of the device, now and at most since the last reset, and of the host: the one account of memory."""
    device, host = get_accelerator(), HostMemory()
    total, where = host.total(), () if device_index is None else (device_index,)
    return {
        "allocated": device.memory_allocated(*where),
        "max_allocated": device.max_memory_allocated(*where),
        "reserved": device.memory_reserved(*where),
        "max_reserved": device.max_memory_reserved(*where),
        "host": total - host.available() if total else 0,
        "host_total": total,
    }


_SHORT = {"MA": "allocated", "Max_MA": "max_allocated", "CA": "reserved", "Max_CA": "max_reserved"}


def memory_line(kinds: Mapping[str, int] | None = None) -> str:
    """Memory in use as a line, by kind where the kinds are known."""
    now = memory_now()
    parts = [f"{name} {now[full] / _GB:.2f} GB" for name, full in _SHORT.items()]
    if now["host_total"]:
        share = 100 * now["host"] / now["host_total"]
        parts.append(f"host memory used {now['host'] / _GB:.2f} GB, {share:.1f} %")
    parts += [f"{kind} {nbytes / _GB:.2f} GB" for kind, nbytes in (kinds or {}).items()]
    return " | ".join(parts)


def see_memory_usage(message: str, force: bool = False, kinds: Mapping[str, int] | None = None) -> None:
    """Write `message` and the memory in use to standard output on rank 0, and start the peaks anew.

    Calls stay in a script for the day they are needed: without `force` nothing happens. `kinds` adds bytes by kind.
    """
    if not force or get_dist_msg("") is None:
        return
    print_dist(f"{message} | {memory_line(kinds)}")
    get_accelerator().reset_peak_memory_stats()


class MemoryBreakdown:
    """Writes the memory in use before and after forward, backward and step, on rank 0, with its kinds."""

    def __init__(self, kinds: Callable[[], Mapping[str, int]] = dict) -> None:
        self._kinds = kinds
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
            see_memory_usage(f"{when} {event.phase.value}, micro step {event.micro_step}", True, self._kinds())
