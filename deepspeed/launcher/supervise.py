"""The launcher's side of a running job: start the guard, pass signals to it, wait, and clean up if it dies.

See [Note: the guard] in guard.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from deepspeed.launcher import processes
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.plan import Plan
from deepspeed.log import logger

__all__ = ["supervise"]

_BARE = Path(__file__).with_name("_bare.py")
_CLEANUP = 10.0  # seconds until processes that do not die of SIGKILL are given up


def supervise(plan: Plan, environment: Mapping[str, str]) -> int:
    """Run the ranks of a plan, and return the exit status of the job; no process is left when it returns."""
    if os.name != "posix":
        raise LaunchError("the launcher needs Linux or another POSIX system; on Windows start one process per rank")
    _open_standard_streams()
    before = processes.below(os.getpid())
    control, ours = os.pipe()
    processes.adopt_orphans()
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_BARE), str(control)],
            pass_fds=(control,),
            env=dict(environment),
            start_new_session=True,
        )
        os.close(control)
        _send(ours, plan)
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


def _send(pipe: int, plan: Plan) -> None:
    data = plan.dumps().encode("ascii")
    view = memoryview(len(data).to_bytes(8, "big") + data)
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
