"""Results that are not there yet: `Pending[T]`, and the handle that asynchronous operations return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from deepspeed.comm.failure import FAILURES
from deepspeed.comm.records import Entry

if TYPE_CHECKING:
    from deepspeed.comm.dispatch import Dispatcher

T = TypeVar("T")
_NOT_YET = object()


class WaitableWork(Protocol):
    """What a `Pending` waits for: torch's Work, an `EventWait`, another Pending."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class AllOf:
    """Several things to wait for as one; for each at most `limit`, if what is waited for knows such a thing."""

    __slots__ = ("_limit", "_works")

    def __init__(self, works: Sequence[WaitableWork], limit: timedelta | None = None) -> None:
        self._works = works
        self._limit = limit

    def wait(self, timeout: timedelta | None = None) -> None:
        timeout = self._limit if timeout is None else timeout
        for work in self._works:
            wait: Callable[..., object] = work.wait
            wait() if timeout is None else wait(timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class EventWait:
    """A device event as something to wait for: waiting makes the current stream wait, not the host."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.wait()

    def is_completed(self) -> bool:
        return bool(self._event.query())


class Pending(Generic[T]):
    """A result and what it waits for. `wait()` gives the result; only the first call waits.

    `finish`, if given, turns the raw result into the final one; it runs once, after the wait.
    """

    __slots__ = ("_finish", "_result", "_waitable")

    def __init__(self, result: T, waitable: WaitableWork | None = None, finish: Callable[[T], T] | None = None) -> None:
        self._result = result
        self._waitable = waitable
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> T:
        """The result, waited for if nobody has yet; `timeout` goes to what is waited for, which must know one."""
        if self._waitable is not None:
            wait: Callable[..., object] = self._waitable.wait
            wait() if timeout is None else wait(timeout)
            self._waitable = None
        if self._finish is not None:
            self._result = self._finish(self._result)
            self._finish = None
        return self._result

    def is_completed(self) -> bool:
        """True once `wait()` would not wait."""
        return self._waitable is None or self._waitable.is_completed()


class CollectiveWork(Pending[bool]):
    """What an asynchronous operation returns: torch's Work with errors that say which operation failed.

    Everything that torch's Work has (`get_future`, `result`, `synchronize`, `_source_rank`, …) is passed on to it.
    """

    __slots__ = ("_dispatcher", "_done", "_entry", "_outcome", "_work")

    def __init__(
        self, work: Any, entry: Entry | None, dispatcher: Dispatcher, done: Callable[[], None] | None = None
    ) -> None:
        self._result, self._waitable, self._finish = True, None, None  # as a Pending, without a call more
        self._work = work
        self._entry = entry
        self._dispatcher = dispatcher
        self._done = done
        self._outcome: object = _NOT_YET

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation, at most `timeout`; what torch's Work gives back, normally True."""
        if self._outcome is not _NOT_YET:
            return self._outcome  # type: ignore[return-value]
        if self._work is None:  # the operation is switched off
            self._outcome = True
            return True
        try:
            outcome = self._work.wait() if timeout is None else self._work.wait(timeout)
        except FAILURES as error:
            explained = self._dispatcher.failed(cast(Entry, self._entry), error)
            if explained is error:
                raise
            raise explained from error
        self._outcome = outcome
        if self._done is not None:
            self._done()
        return outcome  # type: ignore[no-any-return]

    def is_completed(self) -> bool:
        """True once the operation has finished."""
        return self._outcome is not _NOT_YET or self._work is None or bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __repr__(self) -> str:
        state = "completed" if self.is_completed() else "running"
        return f"<{state} {self._entry[1].name if self._entry else 'skipped operation'}>"
