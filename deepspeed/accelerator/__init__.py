"""The current accelerator of this process: the first of the library's three named slots."""

from __future__ import annotations

import threading

from deepspeed.accelerator.detect import find_accelerator, known_names
from deepspeed.accelerator.interface import DeepSpeedAccelerator
from deepspeed.errors import AcceleratorError

__all__ = [
    "DeepSpeedAccelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "reset_accelerator",
    "set_accelerator",
]


class _Slot:
    """Holds one accelerator; empty until somebody asks."""

    def __init__(self) -> None:
        self._held: DeepSpeedAccelerator | None = None
        self._lock = threading.Lock()

    def get(self) -> DeepSpeedAccelerator:
        held = self._held
        if held is not None:
            return held
        with self._lock:
            if self._held is None:
                self._held = find_accelerator()
            return self._held

    def set(self, accelerator: DeepSpeedAccelerator | None) -> None:
        with self._lock:
            self._held = accelerator


_slot = _Slot()


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process: set, named by DS_ACCELERATOR, or detected at the first call."""
    return _slot.get()


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Use this accelerator from now on."""
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise AcceleratorError(
            f"set_accelerator got a {type(accel_obj).__name__}; it needs an instance of a subclass of "
            "deepspeed.accelerator.DeepSpeedAccelerator"
        )
    _slot.set(accel_obj)


def reset_accelerator() -> None:
    """Forget the current accelerator; the next `get_accelerator` looks again."""
    _slot.set(None)


def is_current_accelerator_supported() -> bool:
    """True if the current accelerator is built in, or registered as an entry point."""
    return get_accelerator().device_name() in known_names()
