"""Reads a file of a checkpoint by its blocks and compares them with their sums: each once, when it is needed.

[Note: one pass] A reader that wants values gives the memory for them. Bytes come there straight from the file, piece by
piece, and are summed while the processor's cache has them; a block that is wanted in part goes through a buffer of one
piece. What has been compared is read without a sum after that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepspeed.checkpoint.checksum import KINDS, PIECE
from deepspeed.checkpoint.storage import gibibytes
from deepspeed.checkpoint.stream import FileFacts
from deepspeed.errors import CheckpointError

__all__ = ["FileCheck", "Problem", "odd_size"]

_AHEAD = 8  # blocks that the system is asked to fetch beyond those that are read: readers go from front to end
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


class FileCheck:
    """Compares the blocks of one file with the manifest as they are needed, each at most once."""

    def __init__(self, path: str | os.PathLike[str], facts: FileFacts, *, threads: int | None = None) -> None:
        self.path = Path(path)
        self.facts = facts
        self._threads = threads or min(4, os.cpu_count() or 1)
        self.checked: set[int] = set()
        """Blocks that were compared and are good."""
        self._pool: ThreadPoolExecutor | None = None
        self._coming: dict[int, Future[int]] = {}
        """Sums of blocks that are likely to be asked for next."""

    def require(self, start: int, stop: int) -> None:
        """A CheckpointError that names the file and the damaged range, unless these bytes are what was written."""
        _refuse(self.problems(start, stop))

    def fill(self, start: int, out: memoryview) -> None:
        """Read the bytes from `start` on into `out`; a CheckpointError as of `require` if they are not good."""
        _refuse(self.problems(start, start + len(out), out))

    def problems(self, start: int, stop: int, out: memoryview = _NOTHING) -> list[Problem]:
        """What is wrong with the bytes [start, stop), which are put into `out` where it is given."""
        if stop <= start:
            return []
        odd = odd_size(self.path, self.facts.size)
        if odd is not None:
            return [odd]
        block = self.facts.block
        under = range(start // block, -(-min(stop, self.facts.size) // block))
        wanted = [index for index in under if index not in self.checked]
        coming = {index: self._coming.pop(index) for index in wanted if index in self._coming}
        fresh = [index for index in wanted if index not in coming]
        try:
            sums = self._sums(fresh, start, out) | {index: job.result() for index, job in coming.items()}
            for index in under if out else ():
                if index not in fresh:
                    self._read(index * block, min(index * block + block, stop), start, out)
        except OSError as error:
            return [Problem(str(self.path), f"cannot be read: {error.strerror or error}")]
        bad = [index for index in wanted if sums[index] != self.facts.sums[index]]
        self.checked.update(set(wanted).difference(bad))
        return [Problem(str(self.path), text) for text in self._ranges(bad)]

    def _sums(self, blocks: list[int], start: int, out: memoryview) -> dict[int, int]:
        """The sums of these blocks, read into `out` where it covers them; threads share the work."""
        if not blocks:
            return {}
        block, count = self.facts.block, len(self.facts.sums)
        with open(self.path, "rb", buffering=0) as file:
            length = (blocks[-1] + 1 + _AHEAD - blocks[0]) * block
            os.posix_fadvise(file.fileno(), blocks[0] * block, length, os.POSIX_FADV_WILLNEED)
        if self._threads == 1 or count == 1:
            return {index: self._sum(index, start, out) for index in blocks}
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "checkpoint-read")
        jobs = {index: self._pool.submit(self._sum, index, start, out) for index in blocks}
        if len(out) < block:  # a reader of small tensors: threads go on, while it uses these
            for index in range(blocks[-1] + 1, min(blocks[-1] + 1 + self._threads, count)):
                if index not in self._coming and index not in self.checked:
                    self._coming[index] = self._pool.submit(self._sum, index, 0, _NOTHING)
        return {index: job.result() for index, job in jobs.items()}

    def _sum(self, index: int, start: int, out: memoryview) -> int:
        """The sum of a block, whose bytes go into `out` as far as it, from `start` on, covers them."""
        add, value = KINDS[self.facts.kind], 0
        low, stop = index * self.facts.block, start + len(out)
        high = min(low + self.facts.block, self.facts.size)
        spare = _NOTHING
        with open(self.path, "rb", buffering=0) as file:
            for place in range(low, high, PIECE):
                end = min(place + PIECE, high)
                if start <= place and end <= stop:
                    value = add(_read_at(file.fileno(), out[place - start : end - start], place), value)
                    continue
                spare = spare or memoryview(bytearray(PIECE))
                piece = _read_at(file.fileno(), spare[: end - place], place)
                value = add(piece, value)
                first, last = max(place, start), min(place + len(piece), stop)
                if first < last:
                    out[first - start : last - start] = piece[first - place : last - place]
        return value

    def _read(self, low: int, high: int, start: int, out: memoryview) -> None:
        """Bytes [low, high) that were compared before, as far as `out` covers them."""
        low, high = max(low, start), min(high, start + len(out))
        with open(self.path, "rb", buffering=0) as file:
            count = len(_read_at(file.fileno(), out[low - start : high - start], low))
        if count < high - low:
            raise OSError(f"the file ends at byte {low + count}")

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
