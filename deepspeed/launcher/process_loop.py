"""What the guard and the relay share: a small process that starts others, waits for them, and ends them."""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from deepspeed.launcher import processes
from deepspeed.launcher.output import OutputPipe
from deepspeed.launcher.protocol import NodePlan, RelayPlan, receive
from deepspeed.log import logger, set_log_level_from_string

FAILURE_GRACE = 5.0  # seconds between SIGTERM and SIGKILL once a rank has failed
SIGNAL_GRACE = 30.0  # seconds that ranks get to end after a signal of the user, for instance to save a checkpoint
TICK = 0.05  # seconds between looks at what does not wake the loop
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(kw_only=True)
class Child:
    """A started process; `code` is None while it runs, `at` is when it ended."""

    process: subprocess.Popen[bytes]
    channels: list[OutputPipe]
    code: int | None = None
    at: float = 0.0


C = TypeVar("C", bound=Child)


class ProcessLoop(ABC, Generic[C]):
    """Runs a plan: starts processes, waits for them, and ends them.

    `control` is the reading end of a pipe whose other end only the launcher holds. A byte there is the number of a
    signal to pass on; the end of the pipe means that the launcher is dead, in whatever way. Then `pid_file` is removed.
    """

    def __init__(self, control: int, pid_file: str | None) -> None:
        self._control = control
        self._pid_file = pid_file
        self._children: list[C] = []
        self._signal: int | None = None  # that the user sent to stop the job
        self._agenda: list[tuple[float, Callable[[], None]]] = []  # what happens if processes do not end by then
        self._stopping = self._killed = False
        self._selector = selectors.DefaultSelector()
        self._stop_read, self._stop_write = os.pipe()

    def run(self) -> int:
        """Start everything, wait for all of it, and return the exit status of the job."""
        processes.adopt_orphans()
        self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
        with self._waking():
            trouble = self._start()
            if trouble is not None:
                self._kill()
            self._wait()
        if trouble is not None:
            logger.error("%s", trouble)
            return 127
        return self._verdict()

    def _running(self) -> list[C]:
        return [child for child in self._children if child.code is None]

    def _start_output(self) -> None:
        """Threads come after all forks: a forked child must not find a lock held by a thread that it does not have."""
        for child in self._children:
            for channel in child.channels:
                channel.start()

    def _stopped(self) -> int:
        """Say that the user stopped the job, and return its exit status."""
        assert self._signal is not None, "asked before"
        logger.error("the job was stopped by %s", signal.Signals(self._signal).name)
        return 128 + self._signal

    @abstractmethod
    def _start(self) -> str | None:
        """Start every process; what went wrong if one could not be started."""

    @abstractmethod
    def _wait(self) -> None:
        """Return once nothing runs and all output is passed on."""

    @abstractmethod
    def _verdict(self) -> int:
        """Tell how the job ended, and return its exit status."""

    @abstractmethod
    def _on_signal(self, number: int) -> None:
        """Pass on a signal that the launcher got, other than one of `STOPPING`."""

    @abstractmethod
    def _on_stop(self, number: int) -> None:
        """Stop the job: the launcher, or this process itself, got one of `STOPPING`."""

    def _on_own_signal(self, number: int) -> None:
        self._on_stop(number)

    @abstractmethod
    def _on_orphaned(self) -> None:
        """The launcher was killed."""

    @abstractmethod
    def _kill(self) -> None:
        """End everything by force."""

    def _on_control(self) -> None:
        numbers = os.read(self._control, 4096)
        for number in numbers:
            (self._on_stop if number in STOPPING else self._on_signal)(number)
        if not numbers:
            self._selector.unregister(self._control)
            if self._pid_file is not None:
                with suppress(OSError):
                    os.unlink(self._pid_file)
            self._on_orphaned()

    def _plan_end(self, grace: float, then: Callable[[], None]) -> None:
        self._agenda = [(time.monotonic() + grace, then)]

    def _do_due(self) -> None:
        if self._agenda and time.monotonic() >= self._agenda[0][0]:
            self._agenda.pop(0)[1]()

    @contextmanager
    def _waking(self) -> Iterator[None]:
        """Signals sent to this process wake the selector, and are handled in the loop."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        # A signal for all processes of a job reaches the ranks and the launcher as well: here it must not be fatal.
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, *STOPPING):
            signal.signal(number, lambda *_: None)

        def woken() -> None:
            for number in os.read(read, 4096):
                if number in STOPPING:
                    self._on_own_signal(number)

        self._selector.register(read, selectors.EVENT_READ, woken)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)


def run_plan(kind: Callable[[Any, int], ProcessLoop[Any]], control: int) -> int:
    """Read a plan from the launcher's pipe, run it, and return the exit status."""
    os.set_inheritable(control, False)
    data = receive(control)
    if not data:
        return 1  # the launcher was killed before it could say what to start
    plan: NodePlan | RelayPlan = pickle.loads(data)
    set_log_level_from_string(plan.log_level)
    logging.raiseExceptions = False  # stderr may be closed: then there is nowhere to write to
    return kind(plan, control).run()
