"""Signals of a process that waits in a selector: they wake it, and are handled in its loop."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["STOPPING", "waking"]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def waking(selector: selectors.BaseSelector, on_stop: Callable[[int], None]) -> Iterator[None]:
    """Signals sent to this process wake the selector; one that stops a job is given to `on_stop`."""
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
                on_stop(number)

    selector.register(read, selectors.EVENT_READ, woken)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
