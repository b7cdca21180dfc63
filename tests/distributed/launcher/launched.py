"""A launcher in a process of its own, for tests: forked from a process that has deepspeed loaded, watched by pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import select
import signal
import sys
import time
from pathlib import Path

from deepspeed.launcher import launch
from deepspeed.launcher.hosts import encode_world_info

TIMEOUT = 250.0  # only ever reached by a test that fails
# What the ranks of the harness have in their environment; a launcher is not started by one.
FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT)


class Launched:
    """A running launcher; leaving the context kills it, and so everything below it."""

    def __init__(self, arguments, folder, *, main=launch.main, environ=None, out=None, python=None):
        """`python`: a `Warm` one for the ranks."""
        self.folder = Path(folder)
        self.environ = {"DS_ACCELERATOR": "cpu", **(environ or {})}
        self.python = sys.executable if python is None else python.path
        self.out = out
        ready, self.ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ready)
            self._become(main, [str(word) for word in arguments])
        os.close(self.ready)
        os.read(ready, 1)  # the end of the pipe: the child is set up
        os.close(ready)
        self.pidfd = os.pidfd_open(self.pid)
        self.status = None

    def _become(self, main, arguments):
        code = 70
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            os.setsid()
            os.chdir(self.folder)
            for number in PASSED_ON:  # the tests may run under nohup, and what is ignored stays so in children
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for name in FOREIGN:
                os.environ.pop(name, None)
            os.environ.update(self.environ)
            sys.executable = self.python
            out = self.out if self.out is not None else os.open("out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            err = self.out if self.out is not None else os.open("err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            os.closerange(3, 256)  # the test's own ends of pipes, and `ready`
            main(arguments)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 71
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.pidfd)

    def send(self, number):
        os.kill(self.pid, number)

    def wait(self, patience=TIMEOUT):
        """The exit code as in `subprocess`."""
        assert gone(self.pidfd, patience), "the launcher does not end; it said:\n" + self.errors()
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def output(self):
        return (self.folder / "out").read_text()

    def errors(self):
        return (self.folder / "err").read_text()


class Mailbox:
    """A named pipe through which scripts of ranks tell the test something, or each other, one line each."""

    def __init__(self, folder, name="mailbox"):
        self.path = Path(folder) / name
        os.mkfifo(self.path)
        self.descriptor = os.open(self.path, os.O_RDWR)
        self.rest = b""

    def lines(self, count):
        """So many lines, sorted."""
        found = []
        until = time.monotonic() + TIMEOUT
        while len(found) < count:
            while b"\n" not in self.rest:
                ready, _, _ = select.select([self.descriptor], [], [], until - time.monotonic())
                assert ready, f"only {found} came"
                self.rest += os.read(self.descriptor, 4096)
            line, _, self.rest = self.rest.partition(b"\n")
            found.append(line.decode())
        return sorted(found)

    def numbers(self, count):
        return [int(line) for line in self.lines(count)]


def as_program(arguments):
    """A `main` for `Launched`: a script with its arguments, as an interpreter would run it that has torch loaded."""
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")
    sys.stdout.flush()


def gone(pidfd, patience=TIMEOUT):
    """Wait until the process has ended; False if it does not."""
    return bool(select.select([pidfd], [], [], patience)[0])


def script(folder, text, name="script.py"):
    """A script for ranks: `tell(line)` writes to a mailbox, `hear(name)` waits for a line there of two bytes."""
    path = Path(folder) / name
    path.write_text(PREAMBLE.format(folder=str(folder)) + text)
    return path


PREAMBLE = """
import json, os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def tell(line, name="mailbox"):
    pipe = os.open({folder!r} + "/" + name, os.O_WRONLY)
    os.write(pipe, str(line).encode() + b"\\n")
    os.close(pipe)
def hear(name):
    pipe = os.open({folder!r} + "/" + name, os.O_RDONLY)
    line = os.read(pipe, 2)
    os.close(pipe)
    return line.decode().strip()
def wait_forever():
    while True:
        signal.pause()
"""


def fails(what, code):
    """Text of a script: all ranks tell `what`, then rank 1 fails; it needs a mailbox "turn".

    Not before rank 0 has told its part, since the launcher ends rank 0 then.
    """
    lines = [
        f"tell({what})",
        "tell(0, 'turn') if rank == 0 else hear('turn')",
        f"sys.exit({code}) if rank == 1 else wait_forever()",
    ]
    return "\n".join(lines)


def world(*counts):
    """`--world_info` for hosts h0, h1, … with so many slots each."""
    return "--world_info=" + encode_world_info({f"h{i}": list(range(count)) for i, count in enumerate(counts)})


def local(count, *words):
    """Arguments of the per-node launcher for one node with a port that is free."""
    return [world(count), "--master_port=0", *words]
