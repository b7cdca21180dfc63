"""Memory of the host that stays in place: page-aligned, locked by CUDA where there is a GPU, else by the system."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.log import warn_once
from deepspeed.ops.capability import on_cuda


class _Pages(mmap.mmap):
    """Pages of a tensor, which holds them; unlocked with the last view of it at the latest."""

    locked = False
    by_cuda = False

    def lock(self) -> None:
        """Keep the pages in memory; where that is not permitted, say so once and go on."""
        start, size = self.address, len(self)
        if on_cuda.holds:
            code = int(torch.cuda.cudart().cudaHostRegister(start, size, 0))
            self.locked = self.by_cuda = code == 0
            reason = f"cudaHostRegister answers {code}"
        else:
            libc = ctypes.CDLL(None, use_errno=True)
            self.locked = libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(size)) == 0
            reason = f"{os.strerror(ctypes.get_errno())}; `ulimit -l` tells how much may be locked"
        if not self.locked:
            warn_once(f"memory for files could not be page-locked and may be swapped out: {reason}")

    def unlock(self) -> None:
        """Give the pages back to the system's choice; harmless when repeated."""
        if self.by_cuda:
            torch.cuda.cudart().cudaHostUnregister(self.address)
        elif self.locked:
            ctypes.CDLL(None).munlock(ctypes.c_void_p(self.address), ctypes.c_size_t(len(self)))
        self.locked = self.by_cuda = False

    @property
    def address(self) -> int:
        """Where the pages begin."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def __del__(self) -> None:
        if not sys.is_finalizing():  # after which CUDA may be gone, and the system takes everything back
            self.unlock()


_LOCKED: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()


def locked_tensor(numel: int, dtype: torch.dtype) -> Tensor:
    """A 1-D tensor in zeroed memory of its own, which begins with a page and is locked until `unlock` or its end."""
    if numel < 0:
        raise UsageError(f"a tensor of {numel} elements was asked for; expected a number from 0 up")
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    pages = _Pages(-1, numel * dtype.itemsize)
    pages.lock()
    if pages.locked:
        _LOCKED[pages.address] = pages
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def unlock(address: int) -> bool:
    """Unlock the memory that begins there; False if it is none of `locked_tensor`. It lives as long as its tensors."""
    pages = _LOCKED.pop(address, None)
    if pages is None:
        return False
    pages.unlock()
    return True


def is_locked(tensor: Tensor) -> bool:
    """Whether a device or a disk can use the tensor's memory as it is: pinned by torch, or of `locked_tensor`."""
    if tensor.device.type != "cpu":
        return False
    return tensor.untyped_storage().data_ptr() in _LOCKED or (on_cuda.holds and tensor.is_pinned())
