"""The checksum of a file's block: as safe against damage as a CRC of every byte, at a fraction of its time.

[Note: columns] A block is cut into pieces of 1 MiB and each is seen as rows of 1021 words of 64 bits. A CRC-32 runs
over the sums of the columns, piece after piece. Damage within 8 KiB changes a column's sum for certain; what is larger
would have to keep all 1021 sums. 1021 is a prime, so that sectors of a disk which changed places are in other columns.
Additions run at the speed of memory, which a CRC of every byte does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

COLUMNS = "columns"
"""The name in manifests."""
PIECE = 2**20  # it stays in the processor's cache between reading and summing
_WORD = np.dtype("<u8")
_COUNT = 1021


def columns(piece: Any, value: int = 0) -> int:
    """Go on from `value` with a piece: any buffer, of PIECE bytes unless it is the last of its block."""
    view = memoryview(piece).cast("B")
    words = len(view) // _WORD.itemsize // _COUNT * _COUNT
    if words:
        rows = np.frombuffer(view, _WORD, words).reshape(-1, _COUNT)
        value = zlib.crc32(np.add.reduce(rows, 0), value)
    return zlib.crc32(view[words * _WORD.itemsize :], value)


KINDS: Mapping[str, Callable[[Any, int], int]] = {COLUMNS: columns, "crc32": zlib.crc32}
"""What a manifest may name, each as (piece, value so far) → value."""


class RunningSums:
    """The sums of a file's blocks, from its bytes in order and in whatever portions they come."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._place = 0  # bytes that are in the sums
        self._sums: list[int] = []
        self._held = bytearray()

    def add(self, data: Any) -> None:
        """The next bytes; nothing of `data` is used after the return."""
        view = memoryview(data).cast("B")
        while view:
            wanted = min(PIECE, self._block - self._place % self._block)
            if not self._held and len(view) >= wanted:
                self._fold(view[:wanted])
                view = view[wanted:]
                continue
            count = min(wanted - len(self._held), len(view))
            self._held += view[:count]
            view = view[count:]
            if len(self._held) == wanted:
                self._flush()

    def finish(self) -> tuple[int, ...]:
        """The sums of all blocks; the last one may be short."""
        if self._held:
            self._flush()
        return tuple(self._sums)

    def _flush(self) -> None:
        held, self._held = self._held, bytearray()
        self._fold(memoryview(held))

    def _fold(self, piece: memoryview) -> None:
        if self._place % self._block == 0:
            self._sums.append(0)
        self._sums[-1] = columns(piece, self._sums[-1])
        self._place += len(piece)
