"""`FileEngine`: reads and writes of tensors' bytes beside the computation."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from torch import Tensor

from deepspeed.errors import FileError, UsageError
from deepspeed.ops.aio.open_file import OpenFile, Place, Scratch, describe
from deepspeed.ops.aio.plan import ALIGNMENT, FilePart, Flow
from deepspeed.ops.native import bytes_of


class FileTicket:
    """One read or write on its way. Its tensor is held, and must be left alone, until it is completed."""

    def __init__(self) -> None:
        # A lock of C and no Event, whose own lock an interrupt of `wait` can leave locked: the worker that would then
        # wait for it is joined when the program ends.
        self._running = Lock()
        self._running.acquire()
        self._completed = False
        self._error: Exception | None = None

    def wait(self) -> None:
        """Return when it is completed; raises the FileError that names path, offset, bytes and errno if it failed."""
        while not self._completed:
            with self._running:
                pass
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._completed

    def complete(self, error: Exception | None) -> None:
        """Let `wait` return, or raise this."""
        self._error, self._completed = error, True
        self._running.release()


class FileEngine:
    """Moves bytes between files and contiguous tensors of the host. Its threads are its own; `close` ends them.

    Any size, offset and memory is right; those that are multiples of `alignment` go past the page cache without a copy.
    Requests are independent: who overwrites bytes waits for the ticket of the earlier one first. A completed write is
    with the operating system, which other processes see, and not necessarily on the disk after a power failure.
    """

    alignment: int = ALIGNMENT

    def __init__(
        self,
        *,
        block_size: int,
        queue_depth: int,
        threads: int,
        single_submit: bool = False,
        overlap_events: bool = True,
    ) -> None:
        self.flow = Flow(block_size, queue_depth, threads, single_submit, overlap_events)
        self._workers = Workers(self.flow.workers)
        self._end = weakref.finalize(self, self._workers.close)

    def read(self, path: Place, tensor: Tensor, offset: int = 0) -> FileTicket:
        """Fill `tensor` with the file's bytes from `offset` on."""
        return self._begin(path, tensor, offset, write=False)

    def write(self, path: Place, tensor: Tensor, offset: int = 0) -> FileTicket:
        """Write the tensor's bytes to the file from `offset` on; one that is not there is made, for its owner alone."""
        return self._begin(path, tensor, offset, write=True)

    def close(self) -> None:
        """Finish what is on its way and end the threads; harmless when repeated."""
        self._end()

    def __enter__(self) -> FileEngine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _begin(self, path: Place, tensor: Tensor, offset: int, *, write: bool) -> FileTicket:
        if offset < 0:
            raise UsageError(f"offset is {offset}; expected the number of a byte of {describe(path)}, from 0 up")
        if not isinstance(path, int) and "\0" in os.fspath(path):
            raise UsageError(f"the path {os.fspath(path)!r} has a NUL character in it, which no path can have")
        request = _Request(path, tensor, offset, write)
        parts = self.flow.parts(offset, tensor.nbytes) or [FilePart(0, 0, False)]  # nothing to move, but a file to make
        request.left = len(parts)
        self._workers.give([functools.partial(request.run, part) for part in parts])
        return request.ticket


class _Request:
    """One read or write: its parts are run by any workers in any order, the first to come opens the file."""

    def __init__(self, place: Place, tensor: Tensor, offset: int, write: bool) -> None:
        self.ticket = FileTicket()
        self.left = 0
        self._place = place
        self._tensor: Tensor | None = tensor  # whose memory the view does not hold
        self._view: memoryview | None = bytes_of(tensor)
        self._offset = offset
        self._write = write
        self._file: OpenFile | None = None
        self._error: Exception | None = None
        self._lock = Lock()

    def run(self, part: FilePart, scratch: Scratch) -> None:
        try:
            file, view = self._open()
            if file is not None and self._error is None:
                file.move(view[part.start : part.stop], self._offset + part.start, scratch if part.direct else None)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            self._error = self._error or error
        with self._lock:
            self.left -= 1
            last = self.left == 0
        if last:
            self._finish()

    def _open(self) -> tuple[OpenFile | None, memoryview]:
        assert self._view is not None, "kept until the last part is done"
        with self._lock:
            if self._file is None and self._error is None:
                try:
                    self._file = OpenFile(self._place, offset=self._offset, size=len(self._view), write=self._write)
                except OSError as error:
                    self._error = error
        return self._file, self._view

    def _finish(self) -> None:
        assert self._view is not None, "finished once"
        size = len(self._view)
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:  # some file systems tell only now that a write failed
            self._error = self._error or error
        self._file = self._view = self._tensor = None
        failed = self._error
        self.ticket.complete(self._failed(failed, size) if isinstance(failed, OSError) else failed)

    def _failed(self, error: OSError, size: int) -> FileError:
        what = f"{'write' if self._write else 'read'} of {size} bytes at offset {self._offset}"
        code = error.errno or 0
        made = FileError(code, f"{what}: {error.strerror or os.strerror(code)}", describe(self._place))
        made.__cause__ = error
        return made


Task = Callable[[Scratch], None]


class Workers:
    """Up to `limit` threads that take tasks in order, begun when there is work for them.

    They hold nothing of who gave the work, so that an engine nobody holds ends, and its threads with it. An executor of
    Python would refuse work once the program is about to end, which is when last states are written.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._waiting = 0  # tasks given and not finished
        self._lock = Lock()
        self._closed = False
        self._process = os.getpid()

    def give(self, tasks: Sequence[Task]) -> None:
        """Queue tasks; none of them may raise."""
        if os.getpid() != self._process:
            raise UsageError(
                "this file engine belongs to the process that made it, and its threads did not come along when the "
                "process forked; make one in the new process"
            )
        with self._lock:
            if self._closed:
                raise UsageError("this file engine is closed; make another one")
            self._waiting += len(tasks)
            for _ in range(min(self._waiting, self._limit) - len(self._threads)):
                self._threads.append(Thread(target=self._work, name="deepspeed-file", daemon=True))
                self._threads[-1].start()
            for task in tasks:
                self._tasks.put(task)

    def close(self) -> None:
        """Finish what was given and end the threads; harmless when repeated, and in a forked process."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        scratch = Scratch()
        while True:
            task = self._tasks.get()
            if task is None:
                return
            task(scratch)
            del task  # or an idle thread would hold the last request's memory
            with self._lock:
                self._waiting -= 1
