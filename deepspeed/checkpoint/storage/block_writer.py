"""A file that is written once from front to end, with a checksum per block computed on the way.

[Note: blocks] Each file is divided into blocks of 4 MiB and each block has its own checksum in the manifest. The sums
are computed by threads while the file is written. A reader that needs a part of a file checks the blocks of that part.

[Note: columns] A block is cut into pieces of 1 MiB and each is seen as rows of 1021 words of 64 bits. A CRC-32 runs
over the sums of the columns, piece after piece. Damage within 8 KiB changes a column's sum for certain; what is larger
would have to keep all 1021 sums. 1021 is a prime, so that sectors of a disk which changed places are in other columns.
Additions run at the speed of memory, which a CRC of every byte does not.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspeed.ops.aio.engine import Workers
from deepspeed.ops.aio.open_file import Scratch

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


BLOCK = 4 * 2**20
_PIECE = 2**20  # what is smaller is gathered; copying holds the interpreter's lock, so no more is copied at a time


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a manifest knows of a file."""

    size: int
    sums: tuple[int, ...]
    """The checksum of each block; none of a file that no manifest knows."""
    block: int = BLOCK
    kind: str = COLUMNS
    """Which checksum it is, of `checksum.KINDS`."""


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """How files are written; what `checkpoint.writer` sets."""

    direct: bool = True
    """Past the page cache where the file system can: type FAST; type PYTHON is without."""
    discard: bool = False
    """Sums are computed and nothing is written: type MOCK, to measure everything but the disk."""
    depth: int = 8
    """Blocks that may be on their way to the disk at a time."""
    statistics: bool = False
    """Log the speed of every file."""


class Stream:
    """A binary file to write once from front to end; errors of the disk surface when it is finished.

    `torch.save` runs C++ code around `write`, through which an exception does not come whole. So the first error is
    kept, what follows is dropped, and `finish` raises it.
    """

    def __init__(self, descriptor: int, options: WriterOptions) -> None:
        direct = options.direct and not options.discard and _direct(descriptor, True)
        self._way = _Direct(descriptor, options.depth) if direct else _Plain(descriptor, options.discard)
        self._descriptor = descriptor
        self._discard = options.discard
        self._size = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Take all of `data`, bytes or any other buffer; nothing of it is used after the return."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._error is None:
            try:
                self._way.write(view)
            except OSError as error:
                self._error = error
        return len(view)

    def flush(self) -> None:
        """Nothing to do before `finish`; torch.save calls it."""

    def tell(self) -> int:
        """Bytes taken so far."""
        return self._size

    def finish(self) -> FileFacts:
        """Write what is left, wait for the disk, and tell size and sums."""
        try:
            if self._error is not None:
                raise self._error
            sums = self._way.finish()
            if not self._discard:
                os.fsync(self._descriptor)
        finally:
            self.close()
        return FileFacts(self._size, tuple(sums), BLOCK)

    def close(self) -> None:
        """Give back threads and buffers; harmless when repeated."""
        self._way.close()


def _direct(descriptor: int, on: bool) -> bool:
    """Switch writing past the page cache; False if the file system cannot."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return on and flag != 0


class _Plain:
    """Through the page cache: bytes are written from where they lie, while a thread sums them."""

    def __init__(self, descriptor: int, discard: bool) -> None:
        self._descriptor = descriptor
        self._discard = discard
        self._gathered = bytearray()
        self._place = 0
        self._sums = RunningSums(BLOCK)
        self._workers = _Workers(1)

    def write(self, view: memoryview) -> None:
        if len(view) < _PIECE:
            self._gathered += view
            if len(self._gathered) >= _PIECE:
                self._flush()
        else:
            self._flush()
            self._put(view)

    def finish(self) -> Sequence[int]:
        self._flush()
        return self._sums.finish()

    def close(self) -> None:
        self._workers.close()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        self._put(memoryview(gathered))

    def _put(self, view: memoryview) -> None:
        start = self._place
        self._place += len(view)
        if len(view) <= _PIECE:
            self._sums.add(view)
            self._store(view, start)
            return
        summed = self._workers.submit(self._sum, view)
        try:
            self._store(view, start)
        finally:
            summed.result()

    def _store(self, view: memoryview, start: int) -> None:
        if not self._discard:
            _write_at(self._descriptor, view, start)

    def _sum(self, view: memoryview) -> int:
        self._sums.add(view)
        return 0


class _Direct:
    """Past the page cache: bytes are gathered in page-aligned blocks, which threads sum and write."""

    def __init__(self, descriptor: int, depth: int) -> None:
        self._descriptor = descriptor
        self._depth = depth
        self._buffers: list[mmap.mmap] = []
        self._jobs: list[Future[int]] = []
        self._sums: list[int] = []
        self._filled = 0  # bytes in the block that is being filled
        self._workers = _Workers(depth)

    def write(self, view: memoryview) -> None:
        while view:
            count = min(len(view), BLOCK - self._filled, _PIECE)
            self._buffer()[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == BLOCK:
                self._send()

    def finish(self) -> Sequence[int]:
        self._collect(0)
        if self._filled:
            _direct(self._descriptor, False)  # the end of a file has no whole number of pages
            self._sums.append(self._put(memoryview(self._buffer())[: self._filled], len(self._jobs)))
        return self._sums

    def close(self) -> None:
        self._workers.close()
        self._buffers.clear()  # freed with their last view, which a traceback may hold for a while

    def _buffer(self) -> mmap.mmap:
        place = len(self._jobs) % self._depth
        while place >= len(self._buffers):
            self._buffers.append(mmap.mmap(-1, BLOCK))
        return self._buffers[place]

    def _send(self) -> None:
        """Hand the full buffer to a thread; wait until the next buffer is free."""
        self._jobs.append(self._workers.submit(self._put, memoryview(self._buffer()), len(self._jobs)))
        self._filled = 0
        self._collect(self._depth - 1)

    def _put(self, view: memoryview, index: int) -> int:
        _write_at(self._descriptor, view, index * BLOCK)
        sums = RunningSums(BLOCK)
        sums.add(view)
        return sums.finish()[0]

    def _collect(self, pending: int) -> None:
        """Take the sums of all blocks but the last `pending`."""
        while len(self._sums) < len(self._jobs) - pending:
            self._sums.append(self._jobs[len(self._sums)].result())


class _Workers(Workers):
    """Threads for the blocks of one file."""

    def submit(self, function: Callable[..., int], *arguments: Any) -> Future[int]:
        """What `function` returns, or the error of the disk that it meets."""
        future: Future[int] = Future()

        def run(_: Scratch) -> None:
            try:
                future.set_result(function(*arguments))
            except OSError as error:
                future.set_exception(error)

        self.give([run])
        return future


def _write_at(descriptor: int, view: memoryview, start: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, start)
        view, start = view[count:], start + count
