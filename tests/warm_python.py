"""A Python for ranks of tests that has torch loaded: the script runs in a fork of the test's process.

[Note: a warm Python] A launcher starts its ranks by `sys.executable`. Within `Warm` that is this file, a small program
that hands its arguments, environment, working directory and standard streams to a process which forks the script, and
then stands for it: it passes signals on, and ends as the script ends. When it is killed, so is the script. Whoever
watches pids below the launcher sees those of these programs, so that tests of the launcher itself do not use it.

The script is on the host on which the program was started (its namespaces of networks and names), and what it starts
by its own `sys.executable` is warm, too: so is every process of a job that a launcher starts over ssh.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from typing import Any

VARIABLE = "WARM_PYTHON"  # the socket at which the process waits
NAMESPACES = ("net", "uts")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LENGTH = 8


def stand_for(words: list[str]) -> None:
    """The life of the small program: `words` are those after the interpreter's name."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(os.environ[VARIABLE])
    told = json.dumps({"words": words, "environ": dict(os.environ), "folder": os.getcwd()}).encode()
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    socket.send_fds(line, [len(told).to_bytes(_LENGTH, "little")], [0, 1, 2, *spaces])
    line.sendall(told)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: line.sendall(bytes([number])))
    status = int.from_bytes(line.recv(2, socket.MSG_WAITALL), "little", signed=True)
    if status < 0:
        with contextlib.suppress(OSError):  # some cannot be handled, nor their handling changed
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


class Warm:
    """For a rank of the harness: scripts that are started by `path` while it is open run in forks of this process."""

    def __init__(self) -> None:
        # Names of sockets must be short; this folder goes with the test.
        folder = tempfile.mkdtemp(prefix="warm-", dir=os.path.dirname(os.environ["TEST_STORE"]))
        self.socket = os.path.join(folder, "socket")
        self.path = os.path.join(folder, "python")

    def __enter__(self) -> Warm:
        with open(self.path, "w") as file:
            file.write(
                f"#!/bin/sh\nexport {VARIABLE}={self.socket}\n"
                f'exec {sys.executable} -I -S {os.path.abspath(__file__)} "$@"\n'
            )
        os.chmod(self.path, 0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.socket)
        listener.listen(64)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _Server(listener).serve()
            finally:
                os._exit(1)
        listener.close()
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)  # and with it the kernel kills the scripts
        os.waitpid(self.pid, 0)


class _Server:
    """Forks a script for each who connects, and tells its end."""

    def __init__(self, listener: socket.socket) -> None:
        _end_with_parent()
        self.listener = listener
        self.scripts: dict[int, tuple[int, socket.socket]] = {}  # pidfd → pid and who stands for it

    def serve(self) -> None:
        while True:
            lines = {line.fileno(): pidfd for pidfd, (_, line) in self.scripts.items()}
            ready, _, _ = select.select([self.listener.fileno(), *self.scripts, *lines], [], [])
            for descriptor in ready:
                if descriptor == self.listener.fileno():
                    self._begin(self.listener.accept()[0])
                elif descriptor in self.scripts:
                    self._tell_end(descriptor)
                elif lines[descriptor] in self.scripts:  # else it has just ended
                    self._pass_on(*self.scripts[lines[descriptor]])

    def _begin(self, line: socket.socket) -> None:
        head, descriptors, _, _ = socket.recv_fds(line, _LENGTH, 3 + len(NAMESPACES))
        rest, told = int.from_bytes(head, "little"), b""
        while len(told) < rest:
            told += line.recv(rest - len(told))
        pid = os.fork()
        if pid == 0:
            _become(json.loads(told), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.scripts[os.pidfd_open(pid)] = pid, line

    def _tell_end(self, pidfd: int) -> None:
        pid, line = self.scripts.pop(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # who stood for it was killed
            line.sendall(status.to_bytes(2, "little", signed=True))
        line.close()
        os.close(pidfd)

    def _pass_on(self, pid: int, line: socket.socket) -> None:
        try:
            numbers = line.recv(64)
        except ConnectionResetError:
            numbers = b""
        for number in numbers or bytes([signal.SIGKILL]):
            os.kill(pid, number)  # not reaped yet, so that it is still this one


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _enter(space: int, name: str) -> None:
    """Only where it is another than ours: to enter one is a right of root."""
    if os.fstat(space).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the {name} namespace of the script's host")


def _become(job: dict[str, Any], descriptors: list[int]) -> None:
    """The life of a script, as that of one which an interpreter runs; never returns."""
    status = 1
    try:
        _end_with_parent()
        for target, stream in enumerate(descriptors[:3]):
            os.dup2(stream, target)
        for space, name in zip(descriptors[3:], NAMESPACES, strict=True):
            _enter(space, name)
        os.closerange(3, 256)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
        for number in PASSED_ON:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environ"])
        sys.executable = os.path.join(os.path.dirname(os.environ[VARIABLE]), "python")
        module = job["words"][0] == "-m"
        sys.argv = job["words"][module:]
        sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(sys.argv[0])))
        try:
            if module:
                sys.modules.pop(sys.argv[0], None)  # as no interpreter has it that begins
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["-u"]:
        stand_for(sys.argv[2:])
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])  # another program than a script of a rank
