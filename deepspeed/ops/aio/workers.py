"""`Workers`: the threads of a file engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread

from deepspeed.errors import UsageError
from deepspeed.ops.aio.open_file import Scratch

__all__ = ["Workers"]

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
