"""How one read or write is cut into system calls: arithmetic of bytes, without files."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from deepspeed.errors import UsageError

ALIGNMENT = mmap.PAGESIZE
"""Offsets, sizes and memory that are multiples of this go past the page cache: no disk asks for more, and since whole
pages are either inside or outside, bytes beside them may go through the cache at the same time."""

_MOST_THREADS = 128
_LEAST_BATCH = 16 * 2**20


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes [start, stop) of a request, moved by one worker."""

    start: int
    stop: int
    direct: bool
    """Whether its place in the file is made of whole pages."""


@dataclass(frozen=True, slots=True)
class Flow:
    """How much is handed to the kernel at a time, in the words of the config's `aio` section.

    [Note: batches] A batch of `queue_depth` neighbouring blocks is one vectored system call. The kernel cuts it for the
    disk and keeps all of it in flight, so that one thread keeps a disk busy, and Python is needed once per batch. A
    batch has 16 MiB at least: on a busy machine reads by calls of 4 MiB took a fifth to four fifths longer. With
    `overlap_events` each thread has a partner: the disk works on one batch while the other one is finished. With
    `single_submit` every block is a call of its own, and as many threads make them as there are places in the queue.
    """

    block_size: int
    queue_depth: int
    threads: int
    single_submit: bool = False
    overlap_events: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} is {value!r}; expected a whole number from 1 up")

    @property
    def batch(self) -> int:
        """Bytes of one system call at most, a multiple of the alignment."""
        block = _up(self.block_size)
        return block if self.single_submit else max(block * self.queue_depth, _LEAST_BATCH)

    @property
    def workers(self) -> int:
        """How many system calls are made at a time."""
        partners = 1 if not self.overlap_events else self.queue_depth if self.single_submit else 2
        return min(self.threads * partners, _MOST_THREADS)

    def parts(self, offset: int, size: int) -> list[FilePart]:
        """A request for `size` bytes at `offset` of a file, in order: whole pages in batches, and what is beside them.

        A request that is smaller than all threads' batches together is shared by the threads.
        """
        head = min(-offset % ALIGNMENT, size)
        tail = head + (size - head) // ALIGNMENT * ALIGNMENT
        step = min(self.batch, _up(-(-(tail - head) // self.threads)) or self.batch)
        cut = [FilePart(start, min(start + step, tail), True) for start in range(head, tail, step)]
        edges = [FilePart(0, head, False)] if head else []
        return [*edges, *cut, *([FilePart(tail, size, False)] if tail < size else [])]


def _up(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
