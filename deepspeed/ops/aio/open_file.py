"""`OpenFile`: a file that workers read or write at any offset, past the page cache where it can be."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import stat
import sys
import weakref

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.log import warn_once
from deepspeed.ops.aio.plan import ALIGNMENT
from deepspeed.ops.capability import on_cuda
from deepspeed.ops.native import copy_bytes

Place = str | os.PathLike[str] | int
"""A path, or a descriptor that stays open until the request is done."""

_DIRECT: int = getattr(os, "O_DIRECT", 0)
_BOUNCE = 4 * 2**20


class Scratch:
    """Aligned memory of one worker, made when it is first needed."""

    @functools.cached_property
    def memory(self) -> memoryview:
        """Some megabytes that begin with a page."""
        return memoryview(mmap.mmap(-1, _BOUNCE))


class OpenFile:
    """The descriptors of one request: one past the page cache, if the file system has that, and one through it.

    A file that is written is made readable by its owner alone, and grows before the first byte is written: that is
    faster than growing on the way, and a full disk is known at once.
    """

    def __init__(self, place: Place, *, offset: int, size: int, write: bool) -> None:
        self._write = write
        self._name = describe(place)
        with contextlib.ExitStack() as opened:
            self._plain, self._direct = _descriptors(place, write, opened)
            facts = os.fstat(self._plain)
            if not stat.S_ISREG(facts.st_mode) and not stat.S_ISBLK(facts.st_mode):
                raise OSError(errno.EINVAL, "this is neither a regular file nor a block device")
            end = offset + size
            if stat.S_ISREG(facts.st_mode) and size and facts.st_size < end:
                if not write:
                    raise _ends_early(facts.st_size, end)
                _grow(self._plain, max(offset, facts.st_size), end)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def move(self, view: memoryview, offset: int, scratch: Scratch | None) -> None:
        """Fill `view` from the file, or write it there; with `scratch`, whole pages past the page cache."""
        direct = self._direct
        done = 0 if direct is None or scratch is None else self._past_cache(direct, view, offset, scratch)
        done += self._all(self._plain, view[done:], offset + done, 1)
        if done < len(view):
            raise _ends_early(offset + done, offset + len(view))

    def _past_cache(self, direct: int, view: memoryview, offset: int, scratch: Scratch) -> int:
        """Bytes moved past the cache; fewer than asked if the rest has to go another way."""
        try:
            return self._all(direct, view, offset, ALIGNMENT)
        except OSError as error:
            _accept_refusal(error)
        try:
            return self._bounced(direct, view, offset, scratch)
        except OSError as error:
            _accept_refusal(error)
        self._direct = None  # closed with the request: other workers may be using it
        _tell_cached(self._name)
        return 0

    def _bounced(self, descriptor: int, view: memoryview, offset: int, scratch: Scratch) -> int:
        """As `_all`, for memory that does not begin where a disk can write to."""
        done = 0
        while done < len(view):
            part = view[done : done + _BOUNCE]
            aligned = scratch.memory[: len(part)]
            if self._write:
                copy_bytes(aligned, part)
            moved = self._all(descriptor, aligned, offset + done, ALIGNMENT)
            if not self._write:
                copy_bytes(part[:moved], aligned[:moved])
            done += moved
            if moved < len(part):
                break
        return done

    def _all(self, descriptor: int, view: memoryview, offset: int, unit: int) -> int:
        """Bytes moved until all are, until the file ends, or until a call ends between multiples of `unit`."""
        call = os.pwritev if self._write else os.preadv
        done = 0
        while done < len(view):
            moved = call(descriptor, [view[done:]], offset + done)
            done += moved
            if moved == 0 or moved % unit:
                break
        return done


def describe(place: Place) -> str:
    """A path as it is; a descriptor in words."""
    return f"descriptor {place}" if isinstance(place, int) else os.fspath(place)


def _descriptors(place: Place, write: bool, opened: contextlib.ExitStack) -> tuple[int, int | None]:
    """(through the page cache, past it)"""
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    flags = (os.O_WRONLY if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    if isinstance(place, int):
        if not fcntl.fcntl(place, fcntl.F_GETFL) & _DIRECT:
            return place, None
        return _open(f"/proc/self/fd/{place}", flags, opened), place
    plain = _open(place, flags | (os.O_CREAT if write else 0), opened)
    if not _DIRECT:
        return plain, None
    try:
        return plain, _open(place, flags | _DIRECT, opened)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _tell_cached(describe(place))
    return plain, None


def _open(place: str | os.PathLike[str], flags: int, opened: contextlib.ExitStack) -> int:
    descriptor = os.open(place, flags, 0o600)
    opened.callback(os.close, descriptor)
    return descriptor


def _accept_refusal(error: OSError) -> None:
    """Let an error pass that says that the file system cannot do this in this way."""
    if error.errno != errno.EINVAL:
        raise error


def _tell_cached(name: str) -> None:
    folder = os.path.dirname(os.path.abspath(name))
    warn_once(f"the file system of {folder} cannot read and write past the page cache (O_DIRECT): files go through it")


def _ends_early(found: int, expected: int) -> OSError:
    return OSError(errno.ENODATA, f"the file ends at byte {found}; expected at least {expected} bytes")


def _grow(descriptor: int, start: int, stop: int) -> None:
    """Give a file blocks for [start, stop), or leave it alone and say what is missing."""
    room = os.fstatvfs(descriptor)
    free = room.f_bavail * room.f_frsize
    if room.f_blocks and stop - start > free:  # one without a limit counts nothing
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {stop - start} bytes are needed, {free} are free")
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return
    call = libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(descriptor, 0, start, stop - start):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


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
