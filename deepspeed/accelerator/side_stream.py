"""A stream beside the one that computes: what is queued there waits for what is queued now, and is not waited for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator


class SideStream:
    """A context in which a device queues on its second stream; on a host it changes nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device.type != "cpu" and get_accelerator().device_name() == device.type
        """True if there is a second stream."""
        self._stream: Any = get_accelerator().Stream() if self.device else None
        self._context: Any = None

    def __enter__(self) -> None:
        if self.device:
            accelerator = get_accelerator()
            self._stream.wait_stream(accelerator.current_stream())
            self._context = accelerator.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(*error)

    def again(self) -> Any:
        """A context like this one that does not wait for what was queued on the first stream since."""
        return get_accelerator().stream(self._stream) if self.device else nullcontext()

    def record(self) -> Any:
        """An event behind what is queued on the second stream so far."""
        event = get_accelerator().Event()
        event.record(self._stream)
        return event
