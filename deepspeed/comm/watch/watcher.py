"""The thread that watches one world: it looks at this process, answers other ranks, asks them when something hangs.

[Note: the watcher] Once a second it looks whether collectives were begun, and if none was for a while, at the stacks of
the threads. As long as they change, that is all. If a thread stays inside a call for longer than `warn_after`, it asks
the other ranks and warns which one is late. When the call fails, the failing thread passes it to the watcher and
waits for the verdict. The first rank that claims the incident collects reports and decides; the others read the
decision. Only this thread uses the store, because a store that is stopped or cut off never answers: other threads wait
`patience` seconds for this one. Where hangs are not watched, the thread only answers.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Protocol

import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

from deepspeed.comm.discover import local_ranks
from deepspeed.comm.processes import host_name
from deepspeed.comm.records import Entry
from deepspeed.comm.verdict_pipe import tell_launcher
from deepspeed.comm.watch.inquiry import Inquiry, ReportBuilder, incident_of, judge_locally, write_stacks
from deepspeed.comm.watch.neighbours import Neighbours, Stacks
from deepspeed.comm.watch.report import CallLog, WaitingCall
from deepspeed.comm.watch.settings import HangSettings, seconds_of
from deepspeed.comm.watch.store import StoreGone, WatchStore, store_address
from deepspeed.comm.watch.threads import ActiveCall, Finder, active_calls, interrupt, last_launched, positions
from deepspeed.comm.watch.verdict import NO_VERDICT, HangVerdict
from deepspeed.log import logger

_TICK = 1.0
_QUICK = 0.1  # seconds between looks into the store while a verdict is expected
_SETTLING = 3.0  # seconds in which the ranks of this host find each other
_BEFORE_TORCH = 10.0  # seconds before its own timeout at which a launched collective is given up
_MORE = 1.0  # seconds that a verdict may take beyond the patience
_YOUNG = 60.0  # seconds for which a verdict explains later failures, beyond what an operation may take


@dataclass(slots=True)
class _Failed:
    """A call that failed in another thread, which waits for what became of it."""

    wait: WaitingCall
    done: threading.Event = field(default_factory=threading.Event)
    verdict: HangVerdict = NO_VERDICT


class Answering(Protocol):
    """An object that answers other ranks in the watcher's thread."""

    wait: float
    """Seconds in which it has to answer."""

    def answer(self, store: Any, /) -> None:
        """Look in torch's store for a question and answer it."""


class Watcher:
    """One world's watcher. `call_log` holds what this rank entered, None where the system has no memory files."""

    def __init__(
        self,
        number: int,
        entries: Callable[[], Sequence[Entry]],
        finders: Mapping[CodeType, Finder],
        settings: HangSettings,
        stacks: Stacks | None,
    ) -> None:
        self.settings = settings
        self.call_log = None if stacks is None else CallLog()
        self._stacks = stacks
        self.rank = td.get_rank()
        self._number = number
        self._finders = finders
        self._world: Any = weakref.ref(td.GroupMember.WORLD)
        self._address = store_address()
        self._jobs: queue.SimpleQueue[_Failed | str] = queue.SimpleQueue()
        """Calls that failed; a text ends the watch and tells the others why, unless empty."""
        self._entries = entries
        self._reporter = ReportBuilder(self.rank, entries, None)
        self._since: dict[tuple[Any, ...], float] = {}
        self._reported: set[tuple[Any, ...]] = set()
        self._signature: object = None
        self._counted: dict[str, int] = {}
        self._counted_at = time.monotonic()
        self._began = time.monotonic()
        self._looked = 0.0
        self._alert = 0.0  # until when a verdict is expected
        self._asked = 0
        self._silent_at = math.inf  # when neighbours that have not answered are looked at
        self._found: dict[str, Any] | None = None
        self._used: set[str] = set()  # incidents whose verdicts this rank has raised
        self._decided = ("", 0)  # the incident that this rank decided last, and how many ranks have to read it
        self._store: WatchStore | None = None
        self._answering: tuple[weakref.ref[Answering], ...] = ()
        self._thread = threading.Thread(target=self._live, name="deepspeed-hangs", daemon=True)
        self._thread.start()

    # --- from other threads --------------------------------------------------------------------------------------

    def explain(self, wait: WaitingCall) -> HangVerdict:
        """Why this call failed, by all ranks that can tell; for the thread in which it failed."""
        failed = _Failed(wait)
        self._jobs.put(failed)
        if failed.done.wait(self.settings.patience + _MORE):
            return failed.verdict
        return self._judged_locally(wait, "has not answered")

    def limit(self, group: str) -> float:
        """Seconds that an operation of this group may take."""
        if self.settings.timeout:
            return self.settings.timeout
        found = [known for known, name in tuple(c10d._world.pg_names.items()) if name == group]
        return seconds_of(found[0] if found else td.GroupMember.WORLD)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Other ranks of this host whose call logs are open here."""
        found = self._reporter.neighbours
        return () if found is None else tuple(found.found)

    @property
    def connection(self) -> Any:
        """This watcher's connection to the job's store; None where it has none of its own."""
        store = self._store
        return None if store is None else store.shared

    def let_answer(self, one: Answering) -> None:
        """Call `one.answer` often enough from now on, as long as `one` exists."""
        self._answering = (*map(weakref.ref, self.answering()), weakref.ref(one))

    def answering(self) -> list[Answering]:
        """The objects that answer."""
        return [one for one in (reference() for reference in self._answering) if one is not None]

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def end(self, words: str = "") -> None:
        """Stop soon, and leave `words` for the others."""
        if words and self.call_log is not None:
            self.call_log.write_end(words)
        self._jobs.put(words)

    def join(self, wait: float) -> None:
        """Wait for the thread's end, so many seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(wait)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        self._open()
        job: _Failed | str | None = None
        while not isinstance(job := self._next(), str):
            if isinstance(job, _Failed):
                job.verdict = self._explained(job.wait)
                job.done.set()
                with self._lost_store():
                    self._wait_for_readers()
            elif self._world() is not td.GroupMember.WORLD:
                break  # ended behind our back
            elif self._store is not None:
                with self._lost_store():
                    self._tick()
        with self._lost_store():
            if isinstance(job, str) and job and self._store is not None:
                self._store.publish(replace(self._reporter.report(0, ()), ended=job))
        self._lose()

    def _open(self) -> None:
        with self._lost_store():
            store = self._store = WatchStore(self._number)
            store.set(f"hello/{self.rank}", host_name())
            if self.call_log is not None and self._stacks is not None:
                self._reporter.neighbours = Neighbours(store, self.rank, self.call_log, self._stacks)

    @contextlib.contextmanager
    def _lost_store(self) -> Iterator[None]:
        """Go on without the store once it is gone: this rank then knows what it sees of its host."""
        try:
            yield
        except StoreGone as error:
            logger.debug("ranks cannot tell each other any more who hangs; the store is gone: %s", error)
            self._lose()

    def _lose(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _next(self) -> _Failed | str | None:
        expecting = time.monotonic() < self._alert or self._settling()
        try:
            return self._jobs.get(timeout=min(_QUICK if expecting else _TICK, self._soonest() / 8))
        except queue.Empty:
            return None

    def _settling(self) -> bool:
        """Whether ranks of this host may still have to find each other."""
        known = len(self.neighbours) + 1 >= local_ranks(unknown=td.get_world_size())
        return not known and self._reporter.neighbours is not None and time.monotonic() < self._began + _SETTLING

    def _shortest(self) -> float:
        """Seconds until a hang has to be noticed."""
        timeout = self.settings.timeout or seconds_of(td.GroupMember.WORLD)
        return min(timeout, 2 * self.settings.warns_after(timeout))

    def _soonest(self) -> float:
        """Seconds until something has to be noticed or answered."""
        return min([self._shortest(), *(one.wait for one in self.answering())])

    def _tick(self) -> None:
        if not self.settings.enabled:
            self._answer()
            return
        now = time.monotonic()
        counted = positions()
        if counted != self._counted:
            self._counted, self._counted_at = counted, now
        # Frames keep alive what is in them, and a busy machine may take the processor from this thread while it has
        # some: threads are looked at only where nothing has begun for a while.
        still = now - self._counted_at >= self._shortest() / 8
        found = active_calls(self._finders) if still else []
        launched = last_launched(self._entries())
        began = {one.key: self._counted_at if one in found else now for one in (*found, *launched)}
        self._since = {key: self._since.get(key, since) for key, since in began.items()}
        self._reported &= self._since.keys() | {("gave up", key) for key in self._since}
        signature = (counted, [one.key for one in found])
        moved, self._signature = signature != self._signature, signature
        neighbours = self._reporter.neighbours
        if not moved or now < self._alert or self._settling() or now - self._looked > self._soonest() / 4:
            self._looked = now
            if neighbours is not None:
                neighbours.find_new()
            self._serve()
            self._read_verdict()
        for one in (*found, *launched):
            self._warn(one, now - self._since[one.key])
        for one in launched:
            self._give_up(one, now - self._since[one.key])

    def _waits(self, extra: WaitingCall | None = None) -> list[WaitingCall]:
        now = time.monotonic()
        found = [
            WaitingCall(i.call, i.ranks, now - self._since.get(i.key, now), i.place)
            for i in active_calls(self._finders)
        ]
        if extra is not None and not extra.call.launched:
            same = [wait.seconds for wait in found if wait.call.key == extra.call.key]
            found = [wait for wait in found if wait.call.key != extra.call.key]
            found.insert(0, replace(extra, seconds=max([extra.seconds, *same])))
        return found

    # --- answers -------------------------------------------------------------------------------------------------

    def _serve(self, extra: WaitingCall | None = None) -> None:
        """Answer what other ranks ask; `extra` is a wait of this rank that its stacks no longer show."""
        store = self._store
        if store is None:
            raise StoreGone("it was lost before")
        self._answer()
        for number, question in store.questions():
            self._asked = number
            stacks = write_stacks(self.settings.folder, question["stacks"], self.rank)
            store.publish(self._reporter.report(number, self._waits(extra), stacks))
            if question["over"]:
                now = time.monotonic()
                self._alert = now + self.settings.patience + 3.0
                self._silent_at = now + self.settings.patience * 0.6
        if time.monotonic() > self._silent_at:
            self._silent_at = math.inf
            self._report_silent(store, extra)

    def _answer(self) -> None:
        if self._store is not None:
            with self._store.use() as store:
                for one in self.answering():
                    one.answer(store)

    def _report_silent(self, store: WatchStore, extra: WaitingCall | None) -> None:
        """Report the ranks of this host that did not answer either."""
        neighbours = self._reporter.neighbours
        if neighbours is None:
            return
        reports = store.reports(neighbours.found)
        silent = [rank for rank in neighbours.found if rank not in reports or reports[rank].asked < self._asked]
        if silent:
            own = self._reporter.report(self._asked, self._waits(extra))
            seen = {rank: neighbours.found[rank].report(silent=True) for rank in silent}
            store.publish(replace(own, seen={**own.seen, **seen}))

    def _read_verdict(self) -> None:
        """Keep the newest verdict: the store may end with the rank that gave it."""
        if self._store is None or time.monotonic() > self._alert:
            return
        found = self._store.verdict()
        if found is not None and self._is_news(found):
            self._found = found
            self._alert = 0.0
            self._store.add(f"read/{found['incident']}")

    def _is_news(self, verdict: dict[str, Any]) -> bool:
        """A verdict explains what fails soon after it, as ranks that gave up end and break connections."""
        timeout = self.settings.timeout or seconds_of(td.GroupMember.WORLD)
        young = abs(time.time() - verdict["at"]) < timeout + _YOUNG
        return young and verdict["incident"] not in self._used

    # --- questions -----------------------------------------------------------------------------------------------

    def _warn(self, one: ActiveCall, age: float) -> None:
        """Warn about a call that takes long, once, on one rank."""
        if (
            age < self.settings.warns_after(self.limit(one.call.group))
            or one.key in self._reported
            or self._store is None
        ):
            return
        self._reported.add(one.key)
        wait = WaitingCall(one.call, one.ranks, age, one.place)
        if self._store.add(f"warned/{incident_of(wait)}") == 1:
            found = self._inquiry(hurry=True).decide(wait, over=False)
            # What was launched may well be done: only a rank that is behind shows that it is not.
            still = [*active_calls(self._finders), *(last_launched(self._entries()) if found["ranks"] else ())]
            # A call that has failed meanwhile cut the inquiry short, and gets a verdict of its own.
            if one.key in {other.key for other in still} and self._jobs.empty():
                found_text = found["text"]
                logger.warning(
                    "%s has not completed for %.0f s: %s", one.call, age, found_text, extra={"event": "hang"}
                )

    def _give_up(self, one: ActiveCall, age: float) -> None:
        """End what a device would wait for until torch ends the process without a message."""
        limit, key = self.limit(one.call.group), ("gave up", one.key)
        if age < limit - min(limit / 10, _BEFORE_TORCH) or key in self._reported or self._store is None:
            return
        self._reported.add(key)
        wait = WaitingCall(one.call, one.ranks, age, one.place)
        if self._inquiry(hurry=True).decide(wait, over=False)["ranks"]:
            interrupt(f"{one.call} did not complete: {self._explained(wait).text}")
            self._wait_for_readers()

    def _inquiry(self, *, hurry: bool) -> Inquiry:
        assert self._store is not None, "there is a store"
        stop = (lambda: not self._jobs.empty()) if hurry else (lambda: False)
        return Inquiry(self._store, self._reporter, self.settings.patience, self._serve, stop)

    def _explained(self, wait: WaitingCall) -> HangVerdict:
        found = None
        with self._lost_store():
            found = self._asked_for(wait)
        if found is None:
            return self._judged_locally(wait, "is gone")
        verdict = HangVerdict(tuple(found["ranks"]), found["text"])
        tell_launcher(self.rank, verdict.ranks, verdict.text)
        return verdict

    def _judged_locally(self, wait: WaitingCall, store: str) -> HangVerdict:
        found = judge_locally(wait, self._reporter.report(0, [wait]), self._reporter)
        tell_launcher(self.rank, found.ranks, found.text)
        return replace(found, text=f"{found.text}{self._store_words(store)}")

    def _asked_for(self, wait: WaitingCall) -> dict[str, Any] | None:
        """The verdict: read already, given by another rank, or our own."""
        store = self._store
        if store is None:
            return self._known()
        newest = store.verdict()
        if newest is not None and self._is_news(newest):
            self._found = newest
        if (known := self._known()) is not None:
            return known
        incident = incident_of(wait)
        if store.add(f"claim/{incident}") == 1:
            found = self._inquiry(hurry=False).decide(wait, over=True)
            store.decide(incident, found)
            self._used.add(incident)
            self._decided = (incident, found["answered"])
            return found
        until = time.monotonic() + self.settings.patience + _MORE
        while (other := store.verdict(incident)) is None and time.monotonic() < until:
            self._serve(wait)
            time.sleep(_QUICK / 2)
        self._used.add(incident)
        if other is None:
            return self._inquiry(hurry=True).decide(wait, over=True)
        store.add(f"read/{incident}")
        return other

    def _known(self) -> dict[str, Any] | None:
        found, self._found = self._found, None
        if found is None or not self._is_news(found):
            return None
        self._used.add(found["incident"])
        return found

    def _wait_for_readers(self) -> None:
        """The rank that keeps the store stays until the others have read: its end is the end of the store.

        The end of the program waits for this thread, not much longer."""
        (incident, answered), self._decided = self._decided, ("", 0)
        until = time.monotonic() + (1.5 if incident else 0.0)
        while self.rank == 0 and self._address is not None and time.monotonic() < until and self._store is not None:
            self._serve()
            if int(self._store.find(f"read/{incident}") or 0) >= answered - 1:
                return
            time.sleep(_QUICK / 2)

    def _store_words(self, state: str) -> str:
        if self._address is None:
            return ""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeper = "the launcher's agent" if agent else "rank 0"
        return (
            f"; the job's store at {self._address[0]}:{self._address[1]}, which {keeper} keeps, {state}: that process "
            "has ended or is stopped, or its host cannot be reached"
        )
