"""What waits in host memory while the graphs of DeepCompile run: optimizer states, and activations saved for backward.

[Note: room for activations] Activations grow in forward and shrink in backward, and the optimizer's states are not used
in either. So graphs say how much they hold, and as many bytes of states leave. The peak is what the larger of both
takes, not their sum; what is copied is no more than that needs.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.config.zero import OffloadStateTypeEnum as Kind
from deepspeed.memory.away import AwayStorages, Storage
from deepspeed.runtime.offload_states import inventory
from deepspeed.runtime.parts import Parts

_LEAVING = 2
"""Activations whose memory is held while they are copied; the next one waits for the oldest."""


class StateOffload:
    """See [Note: room for activations]."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.away = AwayStorages(parts.device, pinned=True)
        self._storages: list[Storage] = []
        """In the order in which they leave; empty while all are here."""
        self._ends: list[int] = []
        """Bytes of each with those before it."""
        self._sent = self._empty = 0
        self._ahead = 0
        self.saved = 0
        """Bytes that graphs have saved for backward since all states were here, without the one that runs."""
        if parts.states is not None:
            parts.states.returning = self.back

    def hold(self, room: int, *, wait: bool, returns: bool) -> None:
        """A graph needs so much room: states leave, or all; what exceeds it returns where `returns` is set."""
        room += self.saved
        if not self._storages:
            self._collect()
        before, count = self._taken(self._empty), len(self._storages)
        while self._empty < count and self._taken(self._empty) < room:
            self._send(self._empty + 1)
            self.away.empty(self._storages[self._empty])
            self._empty += 1
        while returns and self._empty and self._taken(self._empty - 1) >= room:
            self._empty -= 1
            self.away.fetch(self._storages[self._empty])
        self._ahead = max(self._ahead, self._taken(self._empty) - before)
        if wait:
            get_accelerator().synchronize()
        while not wait and not returns and self._sent < count and self._taken(self._sent) < room + self._ahead:
            self._send(self._sent + 1)

    def back(self) -> None:
        """All states are here."""
        storages, self._storages = self._storages, []
        for storage in storages[: self._sent]:
            self.away.fetch(storage)
        for storage in storages[: self._sent]:
            self.away.arrive(storage)
        self._sent = self._empty = self.saved = 0

    def _collect(self) -> None:
        found = inventory(self._parts)
        tensors = [*found[Kind.optim_states], *found[Kind.hp_params]]
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        self._storages = [each for each in storages.values() if each.nbytes() and each.resizable()]
        self._ends = list(accumulate(each.nbytes() for each in self._storages))

    def _taken(self, count: int) -> int:
        return self._ends[count - 1] if count else 0

    def _send(self, count: int) -> None:
        while self._sent < count:
            self.away.send(self._storages[self._sent])
            self._sent += 1


class ActivationsAway:
    """Saved tensors whose memory is empty between forward and backward."""

    def __init__(self, parts: Parts) -> None:
        self.away = AwayStorages(parts.device, pinned=parts.config.schema.compile.offload_activation_pin_memory)
        self._leaving: deque[Storage] = deque()
        self.sent = 0
        """Bytes that have left so far."""

    def leave(self, saved: Tensor) -> None:
        """Forward does not read it any more; what is a part of other memory stays."""
        storage = saved.untyped_storage()
        if storage.nbytes() != saved.numel() * saved.element_size() or not storage.resizable():
            return
        self.sent += storage.nbytes()
        self.away.send(storage)
        self._leaving.append(storage)
        self.settle(_LEAVING)

    def settle(self, most: int = 0) -> None:
        """Free the memory of all but the last ones that have left."""
        while len(self._leaving) > most:
            self.away.empty(self._leaving.popleft())

    def fetch(self, saved: Tensor) -> None:
        """Backward needs it soon."""
        self.away.fetch(saved.untyped_storage())

    def arrive(self, saved: Tensor) -> None:
        """Backward needs it now."""
        self.away.arrive(saved.untyped_storage())
