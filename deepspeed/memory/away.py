"""`AwayStorages`: device memory whose content waits in host memory for a while; its tensors stay the objects they are.

A storage is sent (its copy to the host begins), emptied, fetched (a copy back begins) and has arrived. Copies run
concurrently with what computes, which waits where it has to; the host never waits.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.memory.host import host_empty
from deepspeed.memory.streaming import PendingCopy, copy_stream_for

Storage = torch.UntypedStorage


@dataclass(eq=False, slots=True)
class _Away:
    content: Tensor
    copy: PendingCopy
    dropped: weakref.finalize[[int], Storage]
    empty: bool = False


class AwayStorages:
    """Keeps the host memory of what has returned for the next storage of its size, since locking pages takes long."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._copies = copy_stream_for(device)
        self._pinned = pinned
        self._away: dict[int, _Away] = {}
        """By the identity of the storage."""
        self._free: dict[int, list[Tensor]] = {}
        """By their bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes that are in host memory alone."""
        return sum(each.content.numel() for each in self._away.values() if each.empty)

    @torch.no_grad()
    def send(self, storage: Storage) -> None:
        """Begin to copy; nothing may write the storage from now on until it has arrived again. Harmless twice."""
        size = storage.nbytes()
        if storage._cdata in self._away or not size:
            return
        free = self._free.get(size)
        content = free.pop() if free else host_empty(size, torch.uint8, pinned=self._pinned)
        copy = self._copies.copy(content, _bytes(storage))
        dropped = weakref.finalize(storage, self._forget, storage._cdata)
        dropped.atexit = False
        self._away[storage._cdata] = _Away(content, copy, dropped)

    def empty(self, storage: Storage) -> None:
        """Free the device's memory of what was sent, or fetched."""
        away = self._away[storage._cdata]
        if not away.empty:
            away.copy.join()
            storage.resize_(0)
            away.empty = True

    @torch.no_grad()
    def fetch(self, storage: Storage) -> None:
        """Begin to copy back what is away; harmless otherwise."""
        away = self._away.get(storage._cdata)
        if away is not None and away.empty:
            storage.resize_(away.content.numel())
            away.copy = self._copies.copy(_bytes(storage), away.content)
            away.empty = False

    def arrive(self, storage: Storage) -> None:
        """What is queued to compute from now on finds the content; harmless for what is not away."""
        self.fetch(storage)
        away = self._away.get(storage._cdata)
        if away is not None:
            away.copy.join()
            away.dropped.detach()
            self._forget(storage._cdata)

    def _forget(self, identity: int) -> None:
        content = self._away.pop(identity).content
        self._free.setdefault(content.numel(), []).append(content)


def _bytes(storage: Storage) -> Tensor:
    """With a version of its own: autograd does not take a return for a change."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
