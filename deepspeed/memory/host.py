"""Host memory of exact size, page-locked where a device uses it, and device tensors that stay in it for a while.

[Note: parked storages] What moves are storages. Tensors that are given are shown in host memory meanwhile, so that they
can be read there; whatever else is a view of a storage, a flat buffer for instance, finds it empty until it returns.
After that all of them share memory as they did before.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.config.memory import size_text
from deepspeed.log import warn_once

_ALIGNMENT = 64
_PAGE = 4096
_SLAB = 64 << 20
_HUGE = 2 << 20  # bytes of a huge page

HOST_STORAGES: WeakSet[torch.UntypedStorage] = WeakSet()
"""What `host_empty` handed out and is alive: on a CPU, where the device's memory is the host's, nothing else tells."""


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Uninitialised host memory for `numel` elements; page-locked if `pinned` and there is a device to copy to.

    It begins with a page, so that files are read into it and written from it without a copy. torch's own pinned
    allocator rounds every size up to a power of two, which may double what gigabytes take; memory is registered with
    the driver here instead, and unregistered when the tensor's storage goes.
    """
    size = numel * dtype.itemsize
    storage = torch.UntypedStorage(size + _PAGE)
    HOST_STORAGES.add(storage)
    room = torch.empty(0, dtype=torch.uint8).set_(storage)
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


class HostSlabs:
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


@dataclass(frozen=True, eq=False)
class _Place:
    """A storage that is away: its content on the host, and the tensors that are shown there with what they were."""

    storage: torch.UntypedStorage
    content: Tensor
    shown: list[tuple[Tensor, Tensor]]


class ParkedStorages:
    """See [Note: parked storages]. The host memory is kept for the next time, since locking pages takes long."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        """By the identity of the storage on the device."""
        self._memory: dict[tuple[int, int, bool], Tensor] = {}
        """By storage, size and whether it is page-locked."""

    def __bool__(self) -> bool:
        return bool(self._places)

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor], known: Iterable[Tensor], *, pinned: bool, blocking: bool = True) -> None:
        """Bring the storages of `tensors` to the host; of `known` ones those are shown there that share a storage."""
        parked = {_key(place.content) for place in self._places.values()}
        wanted = {key: each for each in tensors if (key := _key(each)) is not None and key not in parked}
        aliases: dict[int, list[Tensor]] = {key: [] for key in wanted}
        for each in {id(each): each for each in (*wanted.values(), *known)}.values():
            key = _key(each)
            if key is not None and key in aliases:
                aliases[key].append(each)
        for key, first in wanted.items():
            self._places[key] = self._leave(key, first.untyped_storage(), aliases[key], pinned=pinned)
        if blocking and any(each.device.type != "cpu" for each in wanted.values()):
            get_accelerator().synchronize()
        for key in wanted:
            if self._places[key].storage.resizable():
                self._places[key].storage.resize_(0)

    @torch.no_grad()
    def bring_back(self, *, blocking: bool = True) -> None:
        """Everything returns to where it was."""
        on_device = False
        for place in self._places.values():
            size = place.content.numel()
            if place.storage.nbytes() != size:
                place.storage.resize_(size)
            _bytes(place.storage).copy_(place.content, non_blocking=True)
            on_device = on_device or place.storage.device.type != "cpu"
            for tensor, before in place.shown:
                tensor.data = before
        self._places.clear()
        if blocking and on_device:
            get_accelerator().synchronize()

    def _leave(self, key: int, storage: torch.UntypedStorage, tensors: list[Tensor], *, pinned: bool) -> _Place:
        kept = (key, storage.nbytes(), pinned)
        content = self._memory.get(kept)
        if content is None:
            content = self._memory[kept] = host_empty(storage.nbytes(), torch.uint8, pinned=pinned)
        content.copy_(_bytes(storage), non_blocking=True)
        # a tensor whose data are replaced keeps its old view of the device alive: it is what it becomes again
        place = _Place(storage, content, [(tensor, tensor.detach()) for tensor in tensors])
        for tensor, before in place.shown:
            at, width = before.storage_offset() * before.element_size(), before.element_size()
            flat = content[at : at + (content.numel() - at) // width * width].view(before.dtype)
            tensor.data = flat.as_strided(before.shape, before.stride())
        return place


def _key(tensor: Tensor) -> int | None:
    """What tells storages apart as long as one is alive; None: there is nothing in it."""
    storage = tensor.untyped_storage()
    return storage._cdata if storage.nbytes() else None


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
