"""`kill -9` at an act on the file system that is counted, not timed: what is on the disk changes only by such acts."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.listdir", "os.scandir"}
_CALLS = ("fsync", "pwrite")  # which no audit hook hears


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run work in a child that is killed just before its n-th act, with 0 never; True if it came so far."""
    pid = os.fork()
    if pid == 0:
        try:
            if number:
                kill_at(number, [os.getpid()])
            work()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), "the work failed before it was killed"
    return code != 0


def kill_at(number: int, pids: Sequence[int]) -> None:
    """Kill processes just before this one's n-th act from now."""
    left = number

    def act() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    at_every_act(act)


def count(work: Callable[[], object]) -> int:
    """How many acts some work takes, done in a child."""
    shared = mmap.mmap(-1, 8)
    pid = os.fork()
    if pid == 0:
        try:
            seen: list[None] = []
            at_every_act(lambda: seen.append(None))
            work()
            shared[:8] = len(seen).to_bytes(8, "little")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    found = int.from_bytes(shared[:8], "little")
    assert found, "the work failed, or did nothing to the file system"
    return found


def at_every_act(act: Callable[[], object]) -> None:
    """From now on, for as long as this process lives."""
    for name in _CALLS:
        original = getattr(os, name)
        setattr(os, name, lambda *arguments, original=original: (act(), original(*arguments))[1])
    sys.addaudithook(lambda event, _: act() if event in _EVENTS else None)
