"""Host buffers that are used again: pinning memory takes longer than copying into it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from deepspeed.runtime.activation_checkpointing.arena import Slot

__all__ = ["HostPool", "size_class"]

_SMALLEST = 512


def size_class(nbytes: int) -> int:
    """The bytes of the buffer for so many: at most an eighth more, so that tensors of about one size share buffers."""
    step = max(_SMALLEST, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


class HostPool:
    """Gives out buffers and keeps up to `limit` that nobody uses; None: as many as were ever used at once."""

    def __init__(self, limit: int | None, make: Callable[[int], torch.Tensor]) -> None:
        self._limit = limit
        self._make = make
        self._free: dict[int, list[torch.Tensor]] = {}  # by size, the size that was used last at the end
        self._sorted = 0  # buffers in `_free`
        self._returned: deque[torch.Tensor] = deque()  # by slots, from any thread, until the next call comes along
        self._in_use = 0
        self._most_in_use = 0

    @property
    def unused(self) -> int:
        """Buffers that wait to be used again."""
        return len(self._returned) + self._sorted

    @property
    def in_use(self) -> int:
        """Buffers that are given out."""
        return self._in_use

    def take(self, numel: int, dtype: torch.dtype) -> Slot[torch.Tensor]:
        """Room for `numel` elements, until the slot is gone."""
        self._sort_returned()
        nbytes = numel * dtype.itemsize
        size = size_class(nbytes)
        of_size = self._free.pop(size, [])
        if of_size:
            buffer = of_size.pop()
            self._sorted -= 1
        else:
            self._drop_oldest()
            buffer = self._make(size)
        self._free[size] = of_size
        self._in_use += 1
        self._most_in_use = max(self._most_in_use, self._in_use)
        return Slot(buffer[:nbytes].view(dtype), buffer, self._take_back)

    def clear(self) -> None:
        """Let go of every buffer that nobody uses."""
        self._returned.clear()
        self._free.clear()
        self._sorted = 0

    def _take_back(self, buffer: torch.Tensor) -> None:
        self._in_use -= 1
        if self.unused < (self._most_in_use if self._limit is None else self._limit):
            self._returned.append(buffer)

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._sorted += 1

    def _drop_oldest(self) -> None:
        """One unused buffer goes for each new one: sizes that nobody asks for any more do not stay for ever."""
        for size in list(self._free):
            if self._free[size]:
                self._free[size].pop()
                self._sorted -= 1
                return
            del self._free[size]
