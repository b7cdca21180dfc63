"""`Watch`: one watcher per world, from its first operation to its end."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any

import torch.distributed as td
from torch.distributed import c10d_logger

from deepspeed.comm.processes import supported
from deepspeed.comm.records import Entry
from deepspeed.comm.watch.neighbours import Stacks
from deepspeed.comm.watch.report import WaitingCall, call_of
from deepspeed.comm.watch.settings import HangSettings, limit_group, limit_groups
from deepspeed.comm.watch.store import connect, has_shared_store
from deepspeed.comm.watch.threads import Finder, failed_call, here, place_of_error
from deepspeed.comm.watch.verdict import NO_VERDICT, HangVerdict
from deepspeed.comm.watch.watcher import Answering, Watcher
from deepspeed.errors import CommError

_TIMEOUTS = ("timed out", "timeout", "time out")
_LOSSES = (*_TIMEOUTS, "connection", "closed", "reset by", "broken pipe", "socket", "aborted")
_END_WAIT = 2.0  # seconds that the end of a world or a program waits until its reason is written


def is_loss(error: BaseException) -> bool:
    """Whether an error of torch says that another rank did not come or is gone, rather than that a call is wrong."""
    if isinstance(error, (CommError, ValueError, TypeError)) or not isinstance(error, RuntimeError):
        return False
    kinds = (td.DistBackendError, td.DistNetworkError, td.DistStoreError)
    return isinstance(error, kinds) or any(word in str(error).lower() for word in _LOSSES)


def is_timeout(error: BaseException) -> bool:
    """Whether torch gave up waiting."""
    return any(word in str(error).lower() for word in _TIMEOUTS)


class Watch:
    """`begin` when a world is first used, `end` with it; `explain` what failed.

    `entries` are the recorded operations, oldest first. `finders` tell for frames of this package which operation they
    run. `noting` receives the function that logs each operation, or None.
    """

    def __init__(
        self,
        entries: Callable[[], Sequence[Entry]],
        finders: Mapping[CodeType, Finder],
        noting: Callable[[Callable[[Entry], None] | None], None],
    ) -> None:
        self._entries = entries
        self._finders = finders
        self._noting = noting
        self._settings = HangSettings()
        self._watcher: Watcher | None = None
        self._worlds = 0
        self._stacks: Stacks | None = None
        self._ending: list[Watcher] = []
        self._torch_errors = _TorchErrors(self)
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._at_exit)

    @property
    def running(self) -> bool:
        """Whether a world is being watched."""
        return self._watcher is not None and self._settings.enabled

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The other ranks of this host that this one can examine, as far as they are known by now."""
        return () if self._watcher is None else self._watcher.neighbours

    @property
    def limit(self) -> timedelta | None:
        """How long the config lets operations take; None where it does not say."""
        timeout = self._settings.timeout
        return None if timeout is None else timedelta(seconds=timeout)

    def configure(self, settings: HangSettings) -> None:
        """Watch as the config says from now on."""
        switched = settings.enabled != self._settings.enabled
        answering = self._watcher.answering() if self._watcher is not None and switched else []
        self._settings = settings
        if switched:
            self.end("")
        if not (td.is_available() and td.is_initialized()):
            return
        if settings.enabled and settings.timeout is not None:
            limit_groups(settings.timeout)
        if self._watcher is not None:
            self._watcher.settings = settings
        elif settings.enabled:
            self._start()
        for one in answering:
            self.let_answer(one)

    def begin(self, group: Any) -> None:
        """A group is used for the first time: the world is watched from now on, if it is not yet."""
        if self._settings.timeout is not None:
            limit_group(group, self._settings.timeout)
        if self._watcher is None and self._settings.enabled:
            self._start()

    def let_answer(self, one: Answering) -> None:
        """Let the watcher's thread call `one.answer` until `one` or the world ends, also with hangs not watched."""
        if self._watcher is None:
            self._start()
        if self._watcher is not None:
            self._watcher.let_answer(one)

    def connection(self) -> Any:
        """A connection to the job's store on which no other code blocks: the watcher's, or a new one."""
        held = None if self._watcher is None else self._watcher.connection
        return connect() if held is None else held

    def _start(self) -> None:
        if not has_shared_store():
            return
        self._worlds += 1
        if self._settings.enabled and self._stacks is None and supported():
            self._stacks = Stacks()
        stacks = self._stacks if self._settings.enabled else None
        self._watcher = Watcher(self._worlds, self._entries, self._finders, self._settings, stacks)
        if self._watcher.call_log is not None:
            self._noting(self._watcher.call_log.note)
        if self._settings.enabled:
            c10d_logger._c10d_logger.addHandler(self._torch_errors)

    def end(self, words: str = "has left torch.distributed (destroy_process_group)") -> None:
        """The world ends, which the others learn in these `words`."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            self._noting(None)
            c10d_logger._c10d_logger.removeHandler(self._torch_errors)
            watcher.end(words)
            self._ending = [one for one in self._ending if one.alive]
            self._ending.append(watcher)

    def join(self) -> None:
        """Wait for watchers that end: a thread in the middle of a call must not meet an interpreter that is gone."""
        for watcher in self._ending:
            watcher.join(_END_WAIT)

    def explain(self, entry: Entry, error: Exception) -> HangVerdict:
        """Who kept this operation from completing, in sentences."""
        if self._watcher is None or not self.running or not is_loss(error) or len(entry[2].ranks) < 2:
            return NO_VERDICT
        return self._watcher.explain(
            WaitingCall(call_of(entry), entry[2].ranks, self._waited(entry[2].name, error), here())
        )

    def explain_torch_call(self, error: BaseException) -> str:
        """The same for a call of torch.distributed that the script made itself."""
        if self._watcher is None or not is_loss(error):
            return ""
        found = failed_call(error, self._finders)
        if found is None or len(found.ranks) < 2:
            return ""
        waited = self._waited(found.call.group, error)
        text = self._watcher.explain(WaitingCall(found.call, found.ranks, waited, found.place)).text
        return f"{found.call.op} failed on rank {self._watcher.rank}: {text}\n  called at : {found.place}"

    def _waited(self, group: str, error: BaseException) -> float:
        """Seconds that a failed call has waited for others, as far as its error tells."""
        limit = self._watcher.limit(group) if self._watcher is not None and is_timeout(error) else 0.0
        return limit if math.isfinite(limit) else 0.0

    def _forked(self) -> None:
        """A child has neither the thread nor a part in the job."""
        self._ending = []
        if self._watcher is not None:
            self._watcher = None
            self._noting(None)
            c10d_logger._c10d_logger.removeHandler(self._torch_errors)

    def _at_exit(self) -> None:
        self.end(_reason_of_end())
        self.join()


def _reason_of_end() -> str:
    """Why the program ends: torch and Python keep the error that ends it."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        told = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {told[0][:300]}" if told else type(error).__name__
        return f"ended with {what}, raised at {place_of_error(error)}"
    return "has finished its program; has its loader fewer batches, or does it leave a loop earlier?"


class _TorchErrors(logging.Handler):
    """Receives torch's log of failed calls, in the thread that failed, and raises what the watch knows instead.

    A call that succeeds costs nothing.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.DEBUG)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        """Replace the error that is being handled by one that says who is at fault."""
        error = sys.exc_info()[1]
        if error is not None and isinstance(record.msg, dict) and "error" in record.msg:
            text = self._watch.explain_torch_call(error)
            if text:
                raise CommError(text) from error
