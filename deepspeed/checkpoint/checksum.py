"""The checksum of a file's block: as safe against damage as a CRC of every byte, at a fraction of its time.

[Note: grid] A block is cut into pieces of 1 MiB and each is seen as a grid of 64-bit words, 512 to a row. The sums
of all rows and columns, piece after piece, go into a CRC-32. Damage within 4 KiB changes a column's sum for certain;
rows or pieces that changed places change the order of the sums; anything else would have to keep the 64-bit sums of all
rows and columns. Additions run at the speed of memory, which a CRC of every byte does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["GRID", "KINDS", "PIECE", "RunningSums", "grid"]

GRID = "grid"
PIECE = 2**20  # it stays in the processor's cache between reading and summing
_WORD = np.dtype("<u8")
_COLUMNS = 512
_ROW = _COLUMNS * _WORD.itemsize


def grid(piece: Any, value: int = 0) -> int:
    """Go on from `value` with a piece: any buffer, of PIECE bytes unless it is the last of its block."""
    view = memoryview(piece).cast("B")
    whole = len(view) // _ROW * _ROW
    if whole:
        words = np.frombuffer(view, _WORD, whole // _WORD.itemsize).reshape(-1, _COLUMNS)
        value = zlib.crc32(np.add.reduce(words, 1), value)
        value = zlib.crc32(np.add.reduce(words, 0), value)
    return zlib.crc32(view[whole:], value)


KINDS: Mapping[str, Callable[[Any, int], int]] = {GRID: grid, "crc32": zlib.crc32}
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
        self._sums[-1] = grid(piece, self._sums[-1])
        self._place += len(piece)
