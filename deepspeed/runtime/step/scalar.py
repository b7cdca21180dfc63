"""A number on its way from the device to the host, which need not wait for it at once."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator

__all__ = ["ScalarOnHost"]


class ScalarOnHost:
    """Copies a scalar to the host behind what is queued now; `value()` waits for that, not for what is queued later."""

    __slots__ = ("_event", "_home")

    def __init__(self, scalar: Tensor) -> None:
        self._home = torch.empty((), dtype=scalar.dtype, pin_memory=scalar.device.type == "cuda")
        self._home.copy_(scalar, non_blocking=True)
        self._event = get_accelerator().Event()
        self._event.record()

    def value(self) -> float:
        """The number."""
        self._event.synchronize()
        return float(self._home)
