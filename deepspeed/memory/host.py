"""Host memory of exact size, page-locked where a device reads and writes it."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.config.memory import size_text
from deepspeed.log import warn_once

__all__ = ["Slabs", "host_empty"]

_ALIGNMENT = 64
_PAGE = 4096
_SLAB = 64 << 20
_HUGE = 2 << 20  # bytes of a huge page


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Uninitialised host memory for `numel` elements; page-locked if `pinned` and there is a device to copy to.

    It begins with a page, so that files are read into it and written from it without a copy. torch's own pinned
    allocator rounds every size up to a power of two, which may double what gigabytes take; memory is registered with
    the driver here instead, and unregistered when the tensor's storage goes.
    """
    size = numel * dtype.itemsize
    room = torch.empty(size + _PAGE, dtype=torch.uint8)
    _advise(room)
    if pinned and numel and get_accelerator().device_name() == "cuda":
        room.fill_(0)  # pages that threads have touched are locked several times as fast as others
        _register(room)
    start = -room.data_ptr() % _PAGE
    return room[start : start + size].view(dtype)


def _advise(memory: Tensor) -> None:
    """Ask for huge pages: an update goes through gigabytes in several places at once, and looks each page up."""
    start = -(-memory.data_ptr() // _HUGE) * _HUGE
    size = (memory.data_ptr() + memory.nbytes) // _HUGE * _HUGE - start
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):  # where the system has none, nothing changes
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def _register(memory: Tensor) -> None:
    runtime = torch.cuda.cudart()
    address, size = memory.data_ptr(), memory.numel() * memory.element_size()
    failed = int(runtime.cudaHostRegister(address, size, 0))
    if failed:
        warn_once(
            f"pin_memory: {size_text(size)} of host memory could not be page-locked (CUDA error {failed}); copies "
            "to and from it are slower. Raise the limit of locked memory (ulimit -l), or set pin_memory to false."
        )
        return
    weakref.finalize(memory.untyped_storage(), _unregister, address).atexit = False  # the driver is gone by then


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class Slabs:
    """Hands out host memory in small parts of large allocations: each of these costs a call of the driver."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for `numel` elements, aligned to 64 bytes at least; what is large gets an allocation of its own."""
        size = numel * dtype.itemsize
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if padded > _SLAB // 4:
            return host_empty(numel, dtype, pinned=self._pinned)
        if padded > self._rest.numel():
            self._rest = host_empty(_SLAB, torch.uint8, pinned=self._pinned)
        taken, self._rest = self._rest[:size], self._rest[padded:]
        return taken.view(dtype)
