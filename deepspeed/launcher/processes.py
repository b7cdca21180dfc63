"""Processes below another: who they are, that they end with their parent, and how a process ended, in words."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
LINUX = sys.platform == "linux"


def _prctl() -> Callable[[int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)

    def control(option: int, value: int) -> int:
        if call(option, value, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
        return 0

    return control


def adopt_orphans(wanted: bool = True) -> bool:
    """Let processes below this one whose parent dies become its children; False where the system cannot."""
    if LINUX:
        _prctl()(_PR_SET_CHILD_SUBREAPER, int(wanted))
    return LINUX


def end_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """A function to call in a new child: the kernel then sends it this signal when this process dies (Linux only)."""
    parent = os.getpid()
    control = _prctl() if LINUX else None  # loads the library, which a child must not do between fork and exec

    def arm() -> None:
        if control is not None:
            control(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return arm


def descendants(root: int, proc: Path = Path("/proc")) -> list[int]:
    """The live processes whose chain of parents leads to `root`, from /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in proc.glob("[0-9]*/stat"):
        try:
            text = entry.read_text(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        # pid (name) state ppid …, where the name may hold spaces and parentheses
        state, parent = text.rpartition(")")[2].split()[:2]
        pid = int(entry.parent.name)
        children.setdefault(int(parent), []).append(pid)
        if state in "ZX":
            dead.add(pid)
    found, waiting = [], [root]
    while waiting:
        own = children.get(waiting.pop(), [])
        waiting += own
        found += own
    return sorted(set(found) - dead)


def send(number: int, targets: Iterable[int]) -> None:
    """Send a signal to processes, or to groups given as negative numbers; those that are gone do not matter."""
    for target in targets:
        with suppress(ProcessLookupError, PermissionError):  # another user's: a program that changed its user
            os.kill(target, number)


def status(code: int) -> int:
    """The exit status that tells of a process's end: its own, or as shells do 128 + the signal that killed it."""
    return code if code >= 0 else 128 - code


def describe_exit(code: int) -> str:
    """ "exited with code 3", or "was killed by SIGKILL (signal 9)"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name} (signal {-code})"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
