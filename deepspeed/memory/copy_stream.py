"""A device's way to and from host memory: copies that run beside what computes, in the order they were asked for.

[Note: one lane]
Copies of both directions share a stream. A host buffer is only touched by copies, so the order of the stream makes it
safe to use one again at once: what is written into it waits for what was read from it. Device memory is allocated and
freed in the order of the stream that computes; `copy` therefore waits for what computes now, and `join` makes what
computes later wait for a copy.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.side_stream import SideStream


def on_device(tensor: torch.Tensor) -> bool:
    """True if the tensor is not in host memory already."""
    return tensor.device.type != "cpu"


class PendingCopy:
    """A copy that was asked for; this one is in the order of what computes."""

    def done(self) -> bool:
        """True once the values are there and the source is no longer read."""
        return True

    def join(self) -> None:
        """What is queued from now on runs after the copy."""

    def wait(self) -> None:
        """Return once the copy is done."""


class CopyStream:
    """Runs copies, first come first served; this one among what computes, which waits for them."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        """Copy once all that is queued so far is done."""
        into.copy_(source, non_blocking=True)
        return PendingCopy()

    def synchronize(self) -> None:
        """Wait until all copies are done."""


class _CopyOnStream(PendingCopy):
    def __init__(self, event: Any, index: int | None) -> None:
        self._event = event
        self._index = index

    def done(self) -> bool:
        return bool(self._event.query())

    def join(self) -> None:
        accelerator = get_accelerator()
        with accelerator.device(self._index):
            self._event.wait(accelerator.current_stream())

    def wait(self) -> None:
        self._event.synchronize()


class DeviceCopyStream(CopyStream):
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        with get_accelerator().device(self._index):
            self._beside = SideStream(device)
        self._last: Any = None

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        with get_accelerator().device(self._index):
            with self._beside:
                into.copy_(source, non_blocking=True)
            self._last = self._beside.record()
        return _CopyOnStream(self._last, self._index)

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.synchronize()


def copy_stream_for(device: torch.device) -> CopyStream:
    """A stream of the device's own where it has streams."""
    accelerator = get_accelerator()
    has_streams = accelerator.Stream is not None and device.type == accelerator.device_name()
    return DeviceCopyStream(device) if has_streams else CopyStream()
