"""Reads a file of a checkpoint by its blocks and compares them with their sums: each once, when it is needed.

[Note: one pass] A reader that wants values gives the memory for all of them at once. The file is read from front to end
by one thread, which keeps the system's read-ahead going and a disk busy. Bytes come straight to their place, piece by
piece, and are summed while the processor's cache has them; a piece that is wanted in parts goes through a buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepspeed.checkpoint.checksum import KINDS, PIECE
from deepspeed.checkpoint.storage import gibibytes
from deepspeed.checkpoint.stream import FileFacts
from deepspeed.errors import CheckpointError

__all__ = ["FileCheck", "Problem", "Range", "odd_size"]

_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a file of a checkpoint."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def odd_size(path: Path, expected: int) -> Problem | None:
    """What is wrong with a file's presence or size."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return Problem(str(path), f"missing; the manifest lists it with {expected} bytes")
    except OSError as error:
        return Problem(str(path), f"cannot be looked at: {error.strerror}")
    if size == expected:
        return None
    how = "truncated" if size < expected else "too long"
    return Problem(str(path), f"{how}: {size} bytes, the manifest says {expected}")


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

    def read(self, descriptor: int, low: int, high: int) -> None:
        """Read what is wanted of the bytes [low, high)."""
        first, last = max(low, self.start), min(high, self.stop)
        count = len(_read_at(descriptor, self.part(first, last), first))
        if count < last - first:
            raise OSError(f"the file ends at byte {first + count}")


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


class FileCheck:
    """Compares the blocks of one file with the manifest as they are needed, each at most once."""

    def __init__(self, path: str | os.PathLike[str], facts: FileFacts, *, threads: int | None = None) -> None:
        self.path = Path(path)
        self.facts = facts
        self._threads = threads or min(4, os.cpu_count() or 1)
        self.checked: set[int] = set() if facts.sums else set(range(-(-facts.size // facts.block)))
        """Blocks that were compared and are good, or with which there is nothing to compare."""

    def require(self, start: int, stop: int) -> None:
        """A CheckpointError that names the file and the damaged range, unless these bytes are what was written."""
        _refuse(self.problems(start, stop))

    def fill(self, wanted: Sequence[Range]) -> None:
        """Read ranges of the file to their places, from front to end; a CheckpointError as of `require`."""
        odd = odd_size(self.path, self.facts.size)
        _refuse([odd] if odd else [])
        bad: list[int] = []
        try:
            with open(self.path, "rb", buffering=0) as file:
                for index, ranges in _by_block(wanted, self.facts.block):
                    if index in self.checked:
                        for each in ranges:
                            each.read(file.fileno(), index * self.facts.block, (index + 1) * self.facts.block)
                    elif self._sum(file.fileno(), index, ranges) == self.facts.sums[index]:
                        self.checked.add(index)
                    else:
                        bad.append(index)
        except OSError as error:
            _refuse([self._unreadable(error)])
        _refuse(self._told(bad))

    def problems(self, start: int, stop: int) -> list[Problem]:
        """What is wrong with the bytes [start, stop)."""
        if stop <= start:
            return []
        odd = odd_size(self.path, self.facts.size)
        if odd is not None:
            return [odd]
        block = self.facts.block
        wanted = [i for i in range(start // block, -(-min(stop, self.facts.size) // block)) if i not in self.checked]
        if not wanted:
            return []
        try:
            sums = self._sums(wanted)
        except OSError as error:
            return [self._unreadable(error)]
        bad = [index for index, value in zip(wanted, sums, strict=True) if value != self.facts.sums[index]]
        self.checked.update(set(wanted).difference(bad))
        return self._told(bad)

    def _sums(self, blocks: list[int]) -> list[int]:
        """The sums of these blocks; threads share the work."""
        if self._threads == 1 or len(blocks) == 1:
            return [self._open_and_sum(index) for index in blocks]
        with ThreadPoolExecutor(self._threads, "checkpoint-verify") as pool:
            return list(pool.map(self._open_and_sum, blocks))

    def _open_and_sum(self, index: int) -> int:
        with open(self.path, "rb", buffering=0) as file:
            return self._sum(file.fileno(), index, ())

    def _sum(self, descriptor: int, index: int, ranges: Sequence[Range]) -> int:
        """The sum of a block, whose bytes go to the places that want some of them."""
        add, value = KINDS[self.facts.kind], 0
        low = index * self.facts.block
        high = min(low + self.facts.block, self.facts.size)
        spare = _NOTHING
        for place in range(low, high, PIECE):
            end = min(place + PIECE, high)
            takers = [each for each in ranges if each.start < end and place < each.stop]
            whole = next((each for each in takers if each.start <= place and end <= each.stop), None)
            if whole is not None:
                target = whole.part(place, end)
            else:
                spare = spare or memoryview(bytearray(PIECE))
                target = spare[: end - place]
            piece = _read_at(descriptor, target, place)
            value = add(piece, value)
            for each in takers:
                if each is not whole:
                    first, last = max(place, each.start), min(place + len(piece), each.stop)
                    each.part(first, last)[:] = piece[first - place : last - place]
        return value

    def _unreadable(self, error: OSError) -> Problem:
        return Problem(str(self.path), f"cannot be read: {error.strerror or error}")

    def _told(self, bad: list[int]) -> list[Problem]:
        return [Problem(str(self.path), text) for text in self._ranges(bad)]

    def _ranges(self, bad: list[int]) -> Iterable[str]:
        """Neighbouring blocks told as one range."""
        block, size = self.facts.block, self.facts.size
        while bad:
            count = next((n for n, index in enumerate(bad) if index != bad[0] + n), len(bad))
            first, last = bad[0] * block, min(bad[count - 1] * block + block, size)
            yield f"damaged between bytes {first} and {last} of {size} ({gibibytes(size)}): the checksum differs"
            bad = bad[count:]


def _refuse(problems: list[Problem]) -> None:
    if problems:
        told = "; ".join(map(str, problems))
        raise CheckpointError(
            f"{told}. The file changed after it was written. Load another checkpoint, or restore the file."
        )


def _read_at(descriptor: int, view: memoryview, place: int) -> memoryview:
    """What of `view` could be filled: all of it, unless the file ends before."""
    count = 0
    while count < len(view):
        got = os.preadv(descriptor, [view[count:]], place + count)
        if got == 0:
            break
        count += got
    return view[:count]
