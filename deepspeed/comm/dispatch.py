"""The one place that every collective passes: it numbers, records, measures for listeners, explains failures."""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as td
from torch.autograd import profiler
from torch.profiler import record_function

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.discover import local_ranks
from deepspeed.comm.failure import FAILURES, explain
from deepspeed.comm.operations import CommOperation, switched_off
from deepspeed.comm.pending import CollectiveWork
from deepspeed.comm.records import (
    CollectiveFinished,
    Entry,
    GroupRecord,
    OperationRecord,
    link_bytes,
    outline,
    read,
    size_of,
)
from deepspeed.comm.watch import HangSettings, Watch
from deepspeed.comm.watch.threads import Finder, title_of
from deepspeed.comm.watch.verdict import NO_VERDICT
from deepspeed.errors import CommError
from deepspeed.events import EventStream, Subscription
from deepspeed.log import warn_once

if TYPE_CHECKING:
    from deepspeed.config.monitor import HangsConfig

CAPACITY = 1024
LogArguments = tuple[bool, str, "str | None"]  # prof, log_name, debug: the keywords that only the logger reads

E = TypeVar("E")
_getframe = sys._getframe


def _synchronize() -> None:
    get_accelerator().synchronize()


class _Stream(EventStream):
    """Knows at any moment whether somebody listens, without a call: every collective asks."""

    __slots__ = ("wanted",)

    def __init__(self) -> None:
        super().__init__()
        self.wanted = False

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> Subscription:
        subscription = super().subscribe(kind, handler)
        self.wanted = self.wants(CollectiveFinished)
        return subscription

    def _drop(self, kind: type, handler: Callable[[Any], None]) -> None:
        super()._drop(kind, handler)
        self.wanted = self.wants(CollectiveFinished)


class Dispatcher:
    """Runs operations, one sequence number per group and kind; keeps the last `CAPACITY` of them in a ring.

    `label` names what the next operations are about (a parameter, a module); `labelled()` sets it for a while.
    It is one slot for all threads: a race can only mislabel a record. `codec` is what they are encoded in.
    """

    __slots__ = (
        *("_clock", "_note", "_notes", "_push", "_ring", "_states", "_synchronize", "_watch_note", "_world"),
        *("codec", "events", "label", "watch"),
    )

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = _synchronize,
    ) -> None:
        self.events = _Stream()
        self.label: str | None = None
        self.codec: str | None = None
        self._clock = clock
        self._synchronize = synchronize
        self._ring: deque[Entry] = deque(maxlen=CAPACITY)
        self._push = self._ring.append
        self._note: Callable[[Entry], None] | None = None
        self._notes: tuple[Callable[[Entry], None], ...] = ()
        self._watch_note: Callable[[Entry], None] | None = None
        self.watch: Watch | None = None
        self._world: GroupRecord | None = None
        self._states: dict[int, GroupRecord] = {}

    def run(
        self,
        operation: CommOperation,
        args: tuple[Any, ...],
        message: Any,
        group: td.ProcessGroup | None,
        async_op: bool,
        log: LogArguments,
    ) -> Any:
        """Call `operation.call(*args)`; `message` is the tensor or list whose size counts as the message's.

        Must be called directly by the public function, since the caller's caller is recorded as the call site.
        """
        state = self._world if group is None else self._states.get(id(group))
        if state is None:
            state = self._open(group)
        if state.off and operation.name in state.off:
            return self._skip(operation, state, async_op)
        if message is None:  # a barrier; raising and catching would cost more than all the rest
            shape = dtype = None
        else:
            try:
                shape, dtype = message.shape, message.dtype
            except AttributeError:
                shape, dtype = outline(message)
        frame = _getframe(2)
        peer = None if operation.peer is None else args[operation.peer]
        p2p = operation.p2p
        sequence = state.next_p2p() if p2p else state.next()
        entry = (sequence, operation, state, shape, dtype, self.label, frame.f_code, frame.f_lasti, peer)
        self._push(entry)
        if self._note is not None:
            self._note(entry)
        done = None
        try:
            if self.events.wanted and operation.timed:
                result, done = self._measured(entry, args, size_of(message), async_op, log)
            else:
                result = call(entry, args)
        except FAILURES as error:
            explained = self.failed(entry, error, args)
            if explained is error:
                raise
            raise explained from error
        if p2p:
            state.returned_p2p = sequence
        else:
            state.returned = sequence
        if async_op and result is not None:
            return self._handles(result, entry, done)
        return result

    def begin(
        self, operation: CommOperation, state: GroupRecord, tensor: Any, label: str, args: tuple[Any, ...]
    ) -> Any:
        """As `run`, for a message between two ranks whose group is known; the caller's caller is the call site."""
        frame = _getframe(2)
        sequence = state.next_p2p()
        peer = args[1]
        entry = (sequence, operation, state, tensor.shape, tensor.dtype, label, frame.f_code, frame.f_lasti, peer)
        self._push(entry)
        if self._note is not None:
            self._note(entry)
        try:
            work = call(entry, args)
        except FAILURES as error:
            explained = self.failed(entry, error, args)
            if explained is error:
                raise
            raise explained from error
        state.returned_p2p = sequence
        return None if work is None else CollectiveWork(work, entry, self)

    def state_of(self, group: td.ProcessGroup) -> GroupRecord:
        """What is known of a group, from now on at the latest."""
        return self._states.get(id(group)) or self._open(group)

    def failed(self, entry: Entry, error: Exception, args: tuple[Any, ...] = ()) -> Exception:
        """The error to raise in place of `error`, with all that is known about the operation."""
        found = NO_VERDICT if self.watch is None else self.watch.explain(entry, error)
        return explain(entry, error, args, self.recent(), found)

    def watched(self) -> Watch:
        """Let the watch find the ranks at fault when an operation fails; the process has one such dispatcher."""
        finders: dict[CodeType, Finder] = {
            Dispatcher.run.__code__: lambda frame: frame.f_locals.get("entry"),
            Dispatcher.begin.__code__: lambda frame: frame.f_locals.get("entry"),
            CollectiveWork.wait.__code__: lambda frame: frame.f_locals["self"]._entry,
        }
        self.watch = Watch(lambda: tuple(self._ring), finders, self._noted_by)
        return self.watch

    def tell(self, note: Callable[[Entry], None]) -> Callable[[], None]:
        """Call `note` with every operation, before it starts, until what is returned is called."""
        self._notes = (*self._notes, note)
        self._choose_note()

        def end() -> None:
            self._notes = tuple(each for each in self._notes if each is not note)
            self._choose_note()

        return end

    def _noted_by(self, note: Callable[[Entry], None] | None) -> None:
        self._watch_note = note
        self._choose_note()

    def _choose_note(self) -> None:
        """Every operation looks for one function, which is there only where it has work."""
        notes = self._notes if self._watch_note is None else (self._watch_note, *self._notes)

        def all_of_them(entry: Entry) -> None:
            for note in notes:
                note(entry)

        self._note = all_of_them if len(notes) > 1 else next(iter(notes), None)

    def recent(self) -> list[OperationRecord]:
        """The recorded operations, oldest first, readable."""
        return [read(entry) for entry in tuple(self._ring)]

    @contextmanager
    def recorded(self) -> Iterator[list[Entry]]:
        """Every operation of a `with` block, oldest first, however many there are; the ring goes on."""
        kept: list[Entry] = []
        push = self._push

        def both(entry: Entry) -> None:
            push(entry)
            kept.append(entry)

        self._push = both
        try:
            yield kept
        finally:
            self._push = push

    @property
    def limit(self) -> timedelta | None:
        """How long the config lets an operation take; None where that is the group's own affair.

        Collectives are limited by their group. Messages are not: gloo lets them take what it was made with."""
        return None if self.watch is None else self.watch.limit

    def forget(self, group: td.ProcessGroup | None = None) -> None:
        """Drop what is known of a group that ends, or of all of them; the ring stays readable."""
        if group is None or group is td.GroupMember.WORLD:
            self._world = None
            self._states.clear()
            if self.watch is not None:
                self.watch.end()
                self.watch.join()
        else:
            self._states.pop(id(group), None)

    def _open(self, group: Any) -> GroupRecord:
        """The state of a group seen for the first time; the switches are read here, once per group."""
        world = td.GroupMember.WORLD if td.is_available() else None
        if world is None:
            raise CommError(
                "a collective was called before torch.distributed was initialised. "
                "Call deepspeed.init_distributed() (or deepspeed.initialize) first."
            )
        real = world if group is None else group
        if not isinstance(real, td.ProcessGroup):  # torch's marker for "this rank is not in the group", or a mistake
            return GroupRecord("(not a member)", (), td.get_rank(), "none", {})
        state = GroupRecord(
            "world" if real is world else real.group_name,
            tuple(td.get_process_group_ranks(real)),
            td.get_rank(),
            td.get_backend(real),
            switched_off(),
            "world" if real is world else title_of(real),
        )
        # The group is known by its address as long as it lives: a strong reference would keep its sockets open.
        key = id(real)
        self._states[key] = state
        weakref.finalize(real, self._gone, key, state).atexit = False
        if real is world:
            self._world = state
        if self.watch is not None:
            self.watch.begin(real)
        return state

    def _gone(self, key: int, state: GroupRecord) -> None:
        if self._states.get(key) is state:
            del self._states[key]
        if self._world is state:
            self._world = None
            if self.watch is not None:
                self.watch.end()

    def _skip(self, operation: CommOperation, state: GroupRecord, async_op: bool) -> CollectiveWork | None:
        warn_once(
            f"{operation.name} is switched off by {state.off[operation.name]} and is not run: "
            "tensors keep their local values, so results are wrong; use this only to measure"
        )
        return CollectiveWork(None, None, self) if async_op else None

    def _measured(
        self, entry: Entry, args: tuple[Any, ...], size: int, async_op: bool, log: LogArguments
    ) -> tuple[Any, Callable[[], None] | None]:
        """Run synchronously and notify the listeners, now or (for free handles) when the handle has been waited for."""
        operation, codec = entry[1], self.codec
        self._synchronize()
        start = self._clock()

        def done() -> None:
            self._synchronize()
            self._emit(entry, size, self._clock() - start, log, codec)

        result = call(entry, args)
        if operation.free and result is not None:
            return result, done
        if async_op and result is not None:
            result.wait()
        done()
        return result, None

    def _emit(self, entry: Entry, size: int, duration: float, log: LogArguments, codec: str | None) -> None:
        sequence, operation, state, _, _, label, code, _, peer = entry
        prof, log_name, debug = log
        between = (state.rank, peer) if operation.p2p and isinstance(peer, int) else state.ranks
        event = CollectiveFinished(
            op=operation.name,
            log_name=log_name,
            bytes=size,
            group_size=max(1, len(state.ranks)),
            duration=duration,
            label=label,
            sequence=sequence,
            caller=debug or code.co_name,
            prof=prof,
            links=link_bytes(operation.name, size, between, local_ranks(unknown=td.get_world_size())),
            codec=codec,
        )
        self.events.emit(event)

    def _handles(self, result: Any, entry: Entry, done: Callable[[], None] | None) -> Any:
        if not isinstance(result, list):
            return CollectiveWork(result, entry, self, done)
        if done is not None:
            done = _last_of(len(result), done)
        return [CollectiveWork(work, entry, self, done) for work in result]


def call(entry: Entry, args: tuple[Any, ...]) -> Any:
    """The operation itself; while torch's profiler runs it is a range of the trace that tells what it is about."""
    operation, label = entry[1], entry[5]
    if not profiler._is_profiler_enabled:
        return operation.call(*args)
    what = operation.name if label is None else f"{operation.name}: {label.replace('…', '...')}"
    named = f"deepspeed: {what} [{entry[2].title}]"
    with record_function(named.encode("ascii", "backslashreplace").decode()):  # a trace has no other letters
        return operation.call(*args)


def _last_of(count: int, done: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `done` when it is called for the `count`-th time."""
    calls = itertools.count(1)

    def one() -> None:
        if next(calls) == count:
            done()

    return one


DEFAULT = Dispatcher()
DEFAULT.watched()


class labelled:
    """Label the operations of a `with` block, for records and errors; labels nest.

    `codec` is the name of what their messages are encoded in.
    """

    __slots__ = ("_before", "_codec", "_dispatcher", "_label")

    def __init__(self, label: str | None, dispatcher: Dispatcher = DEFAULT, codec: str | None = None) -> None:
        self._label = label
        self._dispatcher = dispatcher
        self._codec = codec

    def __enter__(self) -> None:
        at = self._dispatcher
        self._before = at.label, at.codec
        at.label, at.codec = self._label, self._codec

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatcher.label, self._dispatcher.codec = self._before


def recent_operations() -> list[OperationRecord]:
    """The last operations of this rank, oldest first: what a hang is compared by."""
    return DEFAULT.recent()


def watch_hangs(config: HangsConfig | HangSettings) -> None:
    """Watch for collectives that do not complete as the `hangs` section says; for the process, until the next call."""
    assert DEFAULT.watch is not None, "the process's dispatcher is watched"
    DEFAULT.watch.configure(
        HangSettings(config.enabled, config.timeout, config.warn_after, config.patience, config.folder)
    )
