"""The launcher's side of a running job: start the guard, pass signals to it, wait, and clean up if it dies.

See [Note: the guard] in guard.py. Where the launcher itself was started from another host, its stdin is the line that
it hangs on: bytes there are signals, and its end means that the other side is gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from deepspeed.launcher import processes
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.frames import framed
from deepspeed.log import logger

__all__ = ["BEAT", "SILENCE", "supervise"]

BEAT = 0  # the byte that says that the other side still lives
SILENCE = 90.0  # seconds without a beat, after the first one, until the other side counts as gone

_BARE = Path(__file__).with_name("_bare.py")
_CLEANUP = 10.0  # seconds until processes that do not die of SIGKILL are given up
_FAREWELL = 5.0  # seconds that ranks get to end once the other side is gone


class Sendable(Protocol):
    """What can be handed to a program of this folder as text."""

    def dumps(self) -> str:
        """One line of ASCII."""
        ...


def supervise(
    plan: Sendable, environment: Mapping[str, str], *, program: str = "guard", hangs_on_stdin: bool = False
) -> int:
    """Run a plan, and return the exit status of the job; no process is left when it returns."""
    if os.name != "posix":
        raise LaunchError("the launcher needs Linux or another POSIX system; on Windows start one process per rank")
    _open_standard_streams()
    before = processes.below(os.getpid())
    control, ours = os.pipe()
    processes.adopt_orphans()
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_BARE), program, str(control)],
            pass_fds=(control,),
            env=dict(environment),
            stdin=subprocess.DEVNULL if hangs_on_stdin else None,
            start_new_session=True,
        )
        os.close(control)
        _send(ours, plan)
        if hangs_on_stdin:
            threading.Thread(target=_hang_on, args=(0, ours), daemon=True).start()
        with _passing_on(ours):
            code = guard.wait()
        if code < 0:
            logger.error("the guard of the ranks (pid %d) %s: ending the job", guard.pid, processes.described(code))
            _kill_below(before)
    finally:
        os.close(ours)  # if the guard lives, this is the sign for it to end everything
        processes.adopt_orphans(False)
    return processes.status(code)


def _open_standard_streams() -> None:
    """Closed standard streams would be mistaken for the next files that are opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _hang_on(line: int, pipe: int) -> None:
    """Pass on what the other side says, and end everything when it is gone; see [Note: beats] in relay.py."""
    heard, limit = True, None
    while heard:
        ready, _, _ = select.select([line], [], [], limit)
        numbers = os.read(line, 4096) if ready else b""
        heard = bool(numbers)
        if BEAT in numbers:
            limit = SILENCE
        with suppress(OSError):  # the guard has just ended
            os.write(pipe, bytes(number for number in numbers if number != BEAT))
    with suppress(OSError):
        os.write(pipe, bytes([signal.SIGTERM]))
    time.sleep(_FAREWELL)
    os.kill(os.getpid(), signal.SIGKILL)  # which the guard notices, and kills whatever is left


def _send(pipe: int, plan: Sendable) -> None:
    view = memoryview(framed(plan.dumps()))
    with suppress(BrokenPipeError):  # the guard is dead: its exit status will tell
        while view:
            view = view[os.write(pipe, view) :]


@contextmanager
def _passing_on(pipe: int) -> Iterator[None]:
    """While open, signals go to the guard as bytes; those that were ignored (nohup) stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals; somebody else does
        return

    def tell(number: int, frame: FrameType | None = None) -> None:
        with suppress(OSError):  # the guard has just ended
            os.write(pipe, bytes([number]))

    def pause(number: int, frame: FrameType | None) -> None:
        tell(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # here this process stops, until somebody continues it
        signal.signal(signal.SIGTSTP, pause)
        tell(signal.SIGCONT)

    numbers = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH")
    handlers = {getattr(signal, name): tell for name in numbers}
    replaced = {}
    for number, handler in {**handlers, signal.SIGTSTP: pause}.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            replaced[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)


def _kill_below(spared: list[int]) -> None:
    """Kill what a dead guard left: its orphans come to this process."""
    until = time.monotonic() + _CLEANUP
    while left := set(processes.below(os.getpid())) - set(spared):
        processes.send(signal.SIGKILL, left)
        if time.monotonic() > until:
            logger.error("pid %s did not die of SIGKILL", ", ".join(map(str, sorted(left))))
            return
        time.sleep(0.02)
        for pid in left:
            with suppress(ChildProcessError):  # somebody else's child, or not ours yet
                os.waitpid(pid, os.WNOHANG)
