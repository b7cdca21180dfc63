"""Reads a file of a checkpoint by its blocks and compares them with their sums: each once, when it is needed.

[Note: one pass] A reader that wants values gives the memory for all of them at once. Two threads take one block after
the other, from front to end: read it into a buffer, sum it and copy its parts to their places, piece by piece, while
the processor's cache has them. So every byte is read once, and the disk works while sums are computed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed.checkpoint.storage.block_writer import KINDS, PIECE, FileFacts
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.errors import CheckpointError, printable
from deepspeed.trust import open_regular

_PAGE = mmap.PAGESIZE
_READERS = 2


@dataclass(frozen=True, slots=True)
class FileProblem:
    """What is wrong with a file of a checkpoint."""

    file: str
    what: str

    def __str__(self) -> str:
        return printable(f"{self.file}: {self.what}")


def odd_size(path: Path, expected: int) -> FileProblem | None:
    """What is wrong with a file's presence or size."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return FileProblem(str(path), f"missing; the manifest lists it with {expected} bytes")
    except OSError as error:
        return FileProblem(str(path), f"cannot be looked at: {error.strerror}")
    size = found.st_size
    if not stat.S_ISREG(found.st_mode):
        return FileProblem(str(path), "not a regular file")
    if size == expected:
        return None
    how = "truncated" if size < expected else "too long"
    return FileProblem(str(path), f"{how}: {size} bytes, the manifest says {expected}")


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file that somebody wants, and memory for them."""

    start: int
    out: memoryview

    @property
    def stop(self) -> int:
        """The first byte that is not wanted."""
        return self.start + len(self.out)

    def part(self, first: int, last: int) -> memoryview:
        """The memory for the file's bytes [first, last)."""
        return self.out[max(first - self.start, 0) : max(last - self.start, 0)]


def _by_block(wanted: Sequence[Range], block: int) -> Iterator[tuple[int, list[Range]]]:
    """The blocks that are wanted, from front to end, each with those that want some of it."""
    coming = sorted((each for each in wanted if each.out), key=lambda each: each.start)
    open_: list[Range] = []
    index, place = -1, 0
    while open_ or place < len(coming):
        index = index + 1 if open_ else coming[place].start // block
        while place < len(coming) and coming[place].start < (index + 1) * block:
            open_.append(coming[place])
            place += 1
        yield index, open_
        open_ = [each for each in open_ if each.stop > (index + 1) * block]


class _Reader:
    """A file whose blocks threads read, each into a buffer of its own.

    With `past_cache` it comes past the page cache where the file system can do that: without a copy, and without memory
    for the cache, which a machine may have to find first.
    """

    def __init__(self, path: Path, block: int, past_cache: bool) -> None:
        self._block = block
        self._own = threading.local()
        self._file = open_regular(path)
        self._past = self._file
        if past_cache:
            with contextlib.suppress(OSError):  # a file system that cannot
                self._past = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))

    def close(self) -> None:
        """Give back the descriptors."""
        if self._past != self._file:
            os.close(self._past)
        os.close(self._file)

    def read(self, low: int, high: int) -> memoryview:
        """The bytes [low, high) of a block, good until this thread reads again; fewer if the file ends before."""
        buffer = self._buffer()
        if self._past != self._file and low % _PAGE == 0:
            try:
                pages = buffer[: -(-(high - low) // _PAGE) * _PAGE]
                return _read_at(self._past, pages, low, enough=high - low)[: high - low]
            except OSError as error:
                if error.errno != errno.EINVAL:  # one that finds out late that it cannot
                    raise
        return _read_at(self._file, buffer[: high - low], low)

    def _buffer(self) -> memoryview:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, -(-self._block // _PAGE) * _PAGE))  # begins with a page
        found: memoryview = self._own.buffer
        return found


class FileCheck:
    """Compares the blocks of one file with the manifest as they are needed, each at most once.

    `shared`: other processes of this machine are likely to read the same bytes, which then come through the page cache.
    """

    def __init__(
        self, path: str | os.PathLike[str], facts: FileFacts, *, threads: int | None = None, shared: bool = False
    ) -> None:
        self.path = Path(path)
        self.facts = facts
        self._shared = shared
        self._threads = threads or min(4, os.cpu_count() or 1)
        self.checked: set[int] = set() if facts.sums else set(range(-(-facts.size // facts.block)))
        """Blocks that were compared and are good, or with which there is nothing to compare."""

    def require(self, start: int, stop: int) -> None:
        """A CheckpointError that names the file and the damaged range, unless these bytes are what was written."""
        # Through the page cache: whoever asks reads them from the file's map next.
        _refuse(self.problems(start, stop, past_cache=False))

    def fill(self, wanted: Sequence[Range]) -> None:
        """Read ranges of the file to their places; a CheckpointError as of `require`."""
        odd = odd_size(self.path, self.facts.size)
        blocks = list(_by_block(wanted, self.facts.block))
        _refuse([odd] if odd else self._check(blocks, _READERS, not self._shared))

    def problems(self, start: int, stop: int, *, past_cache: bool = True) -> list[FileProblem]:
        """What is wrong with the bytes [start, stop)."""
        if stop <= start:
            return []
        odd = odd_size(self.path, self.facts.size)
        if odd is not None:
            return [odd]
        block = self.facts.block
        under = range(start // block, -(-min(stop, self.facts.size) // block))
        return self._check([(index, []) for index in under if index not in self.checked], self._threads, past_cache)

    def _check(
        self, blocks: Sequence[tuple[int, Sequence[Range]]], threads: int, past_cache: bool
    ) -> list[FileProblem]:
        """Read blocks and give everybody their part; what is wrong with those that had not been compared."""
        if not blocks:
            return []
        reader = None
        try:
            reader = _Reader(self.path, self.facts.block, past_cache)
            work = functools.partial(self._settle, reader)
            if threads == 1 or len(blocks) == 1:
                good = [work(block) for block in blocks]
            else:
                with ThreadPoolExecutor(threads, "checkpoint-read") as pool:
                    good = list(pool.map(work, blocks))
        except OSError as error:
            return [FileProblem(str(self.path), f"cannot be read: {error.strerror or error}")]
        finally:
            if reader is not None:
                reader.close()
        self.checked.update(index for (index, _), fine in zip(blocks, good, strict=True) if fine)
        bad = [index for (index, _), fine in zip(blocks, good, strict=True) if not fine]
        return [FileProblem(str(self.path), text) for text in self._ranges(bad)]

    def _settle(self, reader: _Reader, block: tuple[int, Sequence[Range]]) -> bool:
        """Whether a block is good; copies it to where it is wanted."""
        index, ranges = block
        low = index * self.facts.block
        high = min(low + self.facts.block, self.facts.size)
        data = reader.read(low, high)
        if len(data) < high - low:
            raise OSError(f"the file ends at byte {low + len(data)}")
        add, value = KINDS[self.facts.kind], 0
        known = index in self.checked
        for place in range(low, high, PIECE):  # while the processor's cache has it
            piece = data[place - low : place - low + PIECE]
            value = 0 if known else add(piece, value)
            for each in ranges:
                first, last = max(place, each.start), min(place + len(piece), each.stop)
                if first < last:
                    # numpy lets other threads run while it copies; a memoryview would not.
                    np.copyto(_array(each.part(first, last)), _array(piece[first - place : last - place]))
        return known or value == self.facts.sums[index]

    def _ranges(self, bad: list[int]) -> Iterable[str]:
        """Neighbouring blocks told as one range."""
        block, size = self.facts.block, self.facts.size
        while bad:
            count = next((n for n, index in enumerate(bad) if index != bad[0] + n), len(bad))
            first, last = bad[0] * block, min(bad[count - 1] * block + block, size)
            yield f"damaged between bytes {first} and {last} of {size} ({gibibytes(size)}): the checksum differs"
            bad = bad[count:]


def _refuse(problems: list[FileProblem]) -> None:
    if problems:
        told = "; ".join(map(str, problems))
        raise CheckpointError(
            f"{told}. The file changed after it was written. Load another checkpoint, or restore the file."
        )


def _array(view: memoryview) -> np.ndarray[Any, Any]:
    return np.frombuffer(view, np.uint8)


def _read_at(descriptor: int, view: memoryview, place: int, enough: int | None = None) -> memoryview:
    """What of `view` could be filled: at least `enough` (all of it), unless the file ends before."""
    count, enough = 0, len(view) if enough is None else enough
    while count < enough:
        got = os.preadv(descriptor, [view[count:]], place + count)
        if got == 0:
            break
        count += got
    return view[:count]
