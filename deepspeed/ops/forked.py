"""Pieces of work that processes forked from this one do side by side; what they leave behind is on the disk.

[Note: forked workers] Python's lock lets one thread compute at a time; processes have a lock each. They are forked, so
that they begin with all that is loaded here. A fork copies the one thread that asks for it: locks that others held stay
held in the copy. So who asks makes sure that no thread is inside of what the work uses, the workers touch no device,
and those that are silent for long are ended. This process forks once, since a fork takes the longer the more memory
there is; its child divides itself further. A worker dies with its parent, and nothing that it prints is shown.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

__all__ = ["CAN_FORK", "forked"]

CAN_FORK = sys.platform == "linux"

_SILENT_S = 30.0
"""No piece takes so long: who says nothing until then waits for a lock that nobody holds any more."""
_LOOK_S = 0.2
_PIECE = struct.Struct("=H")
_NO_MORE = 0xFFFF
_ANSWER = struct.Struct("=Hf")
_SET_DEATH_SIGNAL = 1  # of prctl

Work = Callable[[int], float]
"""Does a piece, and returns a number; what it raises means that the piece is not done."""


def forked(
    work: Work,
    pieces: int,
    count: int,
    heard: Callable[[int, float], None],
    *,
    stop: threading.Event,
    quiet: AbstractContextManager[Any],
) -> list[int]:
    """Let `count` processes do `work(0)`, `work(1)` and so on; `heard` is called here with each number that comes.

    `quiet` is held while this process forks. Returns the pieces that were not done: they failed, or their worker ended.
    After `stop` nothing more is done.
    """
    assert 0 < count <= pieces < _NO_MORE, f"{count} processes for {pieces} pieces"
    todo, give = os.pipe()
    answers, answer = os.pipe()
    left = dict.fromkeys(range(pieces))
    try:
        # Each reads its next piece from the same pipe, which holds them all from the beginning.
        os.write(give, b"".join(_PIECE.pack(each) for each in [*range(pieces), *[_NO_MORE] * count]))
        with quiet:
            head = _fork_head(work, todo, answer, count)
        try:
            for piece, number in _answers(answers, head, pieces, stop):
                if not math.isnan(number):
                    left.pop(piece, None)
                    heard(piece, number)
        finally:
            head.end()
    finally:
        for descriptor in (todo, give, answers, answer):
            os.close(descriptor)
    return list(left)


class _Head:
    """The child of this process that all workers come from."""

    def __init__(self, process: int) -> None:
        self._process = process
        self.lives = True

    def look(self) -> bool:
        """True while it lives; it ends after all of its own."""
        if self.lives:
            try:
                self.lives = os.waitpid(self._process, os.WNOHANG) == (0, 0)
            except ChildProcessError:  # somebody else has waited for every child of this process
                self.lives = False
        return self.lives

    def end(self) -> None:
        """End it, and thereby its children: they have nothing more to do, or nobody wants it."""
        if self.look():
            os.kill(self._process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._process, 0)
            self.lives = False


def _fork_head(work: Work, todo: int, answer: int, count: int) -> _Head:
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
    # Python warns of threads, for which see above; only of this module's own fork is nothing said.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=re.escape(__name__))
    process = os.fork()
    if process == 0:
        _run(work, todo, answer, count, lambda: _bind(prctl, parent))
    return _Head(process)


def _answers(answers: int, head: _Head, pieces: int, stop: threading.Event) -> Iterator[tuple[int, float]]:
    """(piece, number) as they come, until all are there or nobody is left to give one."""
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    missing, latest = pieces, time.monotonic()
    while missing and not stop.is_set():
        ended = not head.look()  # before the pipe is read: what was written until then is read
        if poll.poll(0 if ended else 1e3 * _LOOK_S):
            found = [*_ANSWER.iter_unpack(os.read(answers, _ANSWER.size * 64))]
            missing, latest = missing - len(found), time.monotonic()
            yield from found
        elif ended or time.monotonic() - latest > _SILENT_S:
            return


def _bind(prctl: Callable[[int, int], int], parent: int) -> None:
    """Die when the parent does, also if it is gone already."""
    prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(work: Work, todo: int, answer: int, count: int, bind: Callable[[], None]) -> NoReturn:
    """A child's whole life; it never returns into what its parent was about to do."""
    code = 1
    try:
        bind()
        gc.disable()  # objects of the parent may belong to a device
        _be_quiet()
        children = _divide(count)
        _work(work, todo, answer)
        for child in children:
            os.waitpid(child, 0)
        code = 0
    finally:
        os._exit(code)


def _be_quiet() -> None:
    """No handler, no terminal of the parent's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent decides, and takes its children along
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)


def _divide(count: int) -> list[int]:
    """Become `count` processes; returns the children of the one that it returns in."""
    prctl, children = ctypes.CDLL(None).prctl, list[int]()
    while count > 1:
        half, parent = count // 2, os.getpid()
        child = os.fork()
        if child == 0:
            _bind(prctl, parent)
            count, children = half, []
        else:
            count -= half
            children.append(child)
    return children


def _work(work: Work, todo: int, answer: int) -> None:
    while (piece := _PIECE.unpack(os.read(todo, _PIECE.size))[0]) != _NO_MORE:
        try:
            number = work(piece)
        except Exception:  # noqa: BLE001 - the parent tries it again, where the error is told
            number = math.nan
        os.write(answer, _ANSWER.pack(piece, number))
