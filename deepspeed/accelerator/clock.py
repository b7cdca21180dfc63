"""Points in the device's work, the time from one to another, and how times are written.

On a device that works behind the host's back a point is an event in its queue; elsewhere the host's clock is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host import HostEvent


def mark() -> Any:
    """This point of the device's work, as an event with `query`, `synchronize` and `elapsed_time(later)`."""
    accelerator = get_accelerator()
    event = HostEvent() if accelerator.use_host_timers() else accelerator.Event(enable_timing=True)
    event.record()
    return event


class CudaEventTimer:
    """The time between two events of the device, whichever device it is."""

    __slots__ = ("end_event", "start_event")

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event = start_event
        self.end_event = end_event

    def get_elapsed_msec(self) -> float:
        """Milliseconds; waits for the end event."""
        self.end_event.synchronize()
        return float(self.start_event.elapsed_time(self.end_event))


def times_line(milliseconds: Mapping[str, float]) -> str:
    """`time (ms) | fwd: 1.23 | bwd: 4.56`."""
    return " | ".join(["time (ms)", *(f"{name}: {value:.2f}" for name, value in milliseconds.items())])


class HostCopy:
    """A number on its way to the host: the mean of a tensor that may still be computed. Only `read` waits."""

    __slots__ = ("_arrival", "_value")

    def __init__(self, value: torch.Tensor | float) -> None:
        self._arrival: Any = None
        if isinstance(value, torch.Tensor):
            value = value.detach()
            accelerator = get_accelerator()
            if accelerator.on_accelerator(value) and not accelerator.is_synchronized_device():
                value = value.float().mean().to("cpu", non_blocking=True)
                self._arrival = accelerator.Event()
                self._arrival.record()
        self._value = value

    @property
    def arrived(self) -> bool:
        """Whether `read` waits for nothing."""
        return self._arrival is None or bool(self._arrival.query())

    def read(self) -> float:
        """The number; waits for it."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return float(self._value.float().mean()) if isinstance(self._value, torch.Tensor) else float(self._value)
