"""The pipe by which ranks report the rank at fault to their launcher, which then names it and not a waiting one.

The guard makes it and names it in the environment of its ranks, which open it by its path below /proc: a wrapper around
the script may close descriptors that it does not know. In a container the path may mean another file, so the pipe is
known by its inode as well. Both sides are here, without torch. Other systems than Linux have no such pipe.
"""

from __future__ import annotations

import json
import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass

VARIABLE = "DEEPSPEED_VERDICT_PIPE"
_TEXT = 1800  # bytes of a verdict: a longer message would not fit into one atomic write
_YOUNG = 60.0  # seconds for which a verdict explains the end of the rank that reported it


@dataclass(frozen=True, slots=True)
class ReportedVerdict:
    """A verdict: the ranks at fault and the sentence, and when (`time.monotonic`) a rank of this host reported it."""

    ranks: tuple[int, ...]
    text: str
    at: float

    def explains(self, end: float) -> bool:
        """Whether it is why a rank ended at this time: it may also have caught the error and gone on."""
        return bool(self.ranks) and self.at > end - _YOUNG


class VerdictPipe:
    """The guard's side."""

    def __init__(self) -> None:
        self.source, inlet = os.pipe()  # which stays open here, so that the end of a rank is not the pipe's
        os.set_blocking(self.source, False)
        self.environment = {VARIABLE: f"{os.fstat(inlet).st_ino}:/proc/{os.getpid()}/fd/{inlet}"}
        self._rest = b""

    def read(self) -> dict[int, ReportedVerdict]:
        """What came since the last time, the newest of each rank."""
        with suppress(BlockingIOError):
            while data := os.read(self.source, 2**16):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        found = {}
        for line in lines:
            with suppress(ValueError, TypeError):  # a script that writes into descriptors it does not know
                rank, ranks, text, at = json.loads(line)
                found[int(rank)] = ReportedVerdict(tuple(map(int, ranks)), str(text), float(at))
        return found


def tell_launcher(rank: int, ranks: tuple[int, ...], text: str) -> None:
    """Report the ranks at fault, if a guard listens."""
    inode, _, path = os.environ.get(VARIABLE, "").partition(":")
    cut = text.encode()[:_TEXT].decode(errors="ignore")
    line = json.dumps([rank, ranks[:64], cut, time.monotonic()], ensure_ascii=False).encode() + b"\n"
    if not inode.isdigit() or len(line) > select.PIPE_BUF:
        return
    with suppress(OSError):  # the guard is gone, or the pipe is full
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_ino == int(inode):
                os.write(descriptor, line)
        finally:
            os.close(descriptor)
