"""The thread that watches one world: it looks at this process, answers other ranks, asks them when something hangs.

[Note: the watcher] It sleeps for a second and looks whether collectives were begun; where none was for a while, at the
stacks of the threads (`look`). As long as they move, that is all. A thread that stays inside one call longer than
`warn_after` is a reason to ask the other ranks, and to warn who is late. When the call fails, the thread that it fails
in hands it over and waits for the verdict. One rank, the first that claims it, collects reports and decides; the others
hear the decision. All use of the store is in this thread, because a store that is stopped or cut off answers never: who
waits for this thread waits `patience` seconds.
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
from typing import Any

import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

from deepspeed.comm.records import Entry
from deepspeed.comm.verdict_pipe import tell_launcher
from deepspeed.comm.watch.call_log import CallLog
from deepspeed.comm.watch.inquiry import Inquiry, ReportBuilder, incident_of, judge_by_eye, write_stacks
from deepspeed.comm.watch.neighbours import Neighbours, Stacks, host_name
from deepspeed.comm.watch.report import WaitingCall
from deepspeed.comm.watch.settings import HangSettings, seconds_of
from deepspeed.comm.watch.store import StoreGone, WatchStore, store_home
from deepspeed.comm.watch.threads import ActiveCall, Finder, insides, interrupt, last_launched, positions
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


@dataclass(frozen=True, slots=True)
class _End:
    """The watch ends; `words` are told to the others unless empty."""

    words: str


class Watcher:
    """One world's watcher. `box` holds what this rank entered, None where the system has no memory files."""

    def __init__(
        self,
        number: int,
        entries: Callable[[], Sequence[Entry]],
        finders: Mapping[CodeType, Finder],
        settings: HangSettings,
        stacks: Stacks | None,
    ) -> None:
        self.settings = settings
        self.box = None if stacks is None else CallLog()
        self._stacks = stacks
        self.rank = td.get_rank()
        self._number = number
        self._finders = finders
        self._world: Any = weakref.ref(td.GroupMember.WORLD)
        self._home = store_home()
        self._jobs: queue.SimpleQueue[_Failed | _End] = queue.SimpleQueue()
        self._entries = entries
        self._witness = ReportBuilder(self.rank, entries, None)
        self._since: dict[tuple[Any, ...], float] = {}
        self._told: set[tuple[Any, ...]] = set()
        self._signature: object = None
        self._counted: dict[str, int] = {}
        self._counted_at = time.monotonic()
        self._began = time.monotonic()
        self._looked = 0.0
        self._alert = 0.0  # until when a verdict is expected
        self._asked = 0
        self._silent_at = math.inf  # when neighbours that have not answered are looked at
        self._heard: dict[str, Any] | None = None
        self._used: set[str] = set()  # incidents whose verdicts this rank has raised
        self._given = ("", 0)  # the incident that this rank decided last, and how many ranks have to hear of it
        self._mailbox: WatchStore | None = None
        self._thread = threading.Thread(target=self._live, name="deepspeed-hangs", daemon=True)
        self._thread.start()

    # --- from other threads --------------------------------------------------------------------------------------

    def explain(self, wait: WaitingCall) -> HangVerdict:
        """Why this call failed, by all ranks that can tell; for the thread in which it failed."""
        failed = _Failed(wait)
        self._jobs.put(failed)
        if failed.done.wait(self.settings.patience + _MORE):
            return failed.verdict
        return self._judged_by_eye(wait, "has not answered")

    def limit(self, group: str) -> float:
        """Seconds that an operation of this group may take."""
        return self.settings.timeout or _limit(group)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Other ranks of this host whose boxes are open here."""
        found = self._witness.neighbours
        return () if found is None else tuple(found.found)

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def end(self, words: str = "") -> None:
        """Stop soon; others are told `words`."""
        if words and self.box is not None:
            self.box.say(words)
        self._jobs.put(_End(words))

    def join(self, wait: float) -> None:
        """Wait for the thread's end, so many seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(wait)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        self._open()
        job: _Failed | _End | None = None
        while not isinstance(job := self._next(), _End):
            if isinstance(job, _Failed):
                job.verdict = self._explained(job.wait)
                job.done.set()
                with self._lost_store():
                    self._linger()
            elif self._world() is not td.GroupMember.WORLD:
                break  # ended behind our back
            elif self._mailbox is not None:
                with self._lost_store():
                    self._tick()
        with self._lost_store():
            if isinstance(job, _End) and job.words and self._mailbox is not None:
                self._mailbox.publish(replace(self._witness.report(0, ()), ended=job.words))
        self._lose()

    def _open(self) -> None:
        with self._lost_store():
            mailbox = self._mailbox = WatchStore(self._number)
            mailbox.set(f"hello/{self.rank}", host_name())
            if self.box is not None and self._stacks is not None:
                self._witness.neighbours = Neighbours(mailbox, self.rank, self.box, self._stacks)

    @contextlib.contextmanager
    def _lost_store(self) -> Iterator[None]:
        """Go on without the store once it is gone: this rank then knows what it sees of its host."""
        try:
            yield
        except StoreGone as error:
            logger.debug("ranks cannot tell each other any more who hangs; the store is gone: %s", error)
            self._lose()

    def _lose(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    def _next(self) -> _Failed | _End | None:
        expecting = time.monotonic() < self._alert or self._settling()
        try:
            return self._jobs.get(timeout=min(_QUICK if expecting else _TICK, self._shortest() / 8))
        except queue.Empty:
            return None

    def _settling(self) -> bool:
        """Whether ranks of this host may still have to find each other."""
        here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
        known = len(self.neighbours) + 1 >= (int(here) if here.isdigit() else td.get_world_size())
        return not known and self._witness.neighbours is not None and time.monotonic() < self._began + _SETTLING

    def _shortest(self) -> float:
        """Seconds until something has to be noticed."""
        timeout = self.settings.timeout or seconds_of(td.GroupMember.WORLD)
        return min(timeout, 2 * self.settings.warns_after(timeout))

    def _tick(self) -> None:
        now = time.monotonic()
        counted = positions()
        if counted != self._counted:
            self._counted, self._counted_at = counted, now
        # Frames keep alive what is in them, and a busy machine may take the processor from this thread while it has
        # some: threads are looked at only where nothing has begun for a while.
        still = now - self._counted_at >= self._shortest() / 8
        found = insides(self._finders) if still else []
        launched = last_launched(self._entries())
        began = {one.key: self._counted_at if one in found else now for one in (*found, *launched)}
        self._since = {key: self._since.get(key, since) for key, since in began.items()}
        self._told &= self._since.keys() | {("gave up", key) for key in self._since}
        signature = (counted, [one.key for one in found])
        moved, self._signature = signature != self._signature, signature
        neighbours = self._witness.neighbours
        if not moved or now < self._alert or self._settling() or now - self._looked > self._shortest() / 4:
            self._looked = now
            if neighbours is not None:
                neighbours.look_around()
            self._serve()
            self._hear()
        for one in (*found, *launched):
            self._warn(one, now - self._since[one.key])
        for one in launched:
            self._give_up(one, now - self._since[one.key])

    def _waits(self, extra: WaitingCall | None = None) -> list[WaitingCall]:
        now = time.monotonic()
        found = [
            WaitingCall(i.call, i.ranks, now - self._since.get(i.key, now), i.place) for i in insides(self._finders)
        ]
        if extra is not None and not extra.call.launched:
            same = [wait.seconds for wait in found if wait.call.key == extra.call.key]
            found = [wait for wait in found if wait.call.key != extra.call.key]
            found.insert(0, replace(extra, seconds=max([extra.seconds, *same])))
        return found

    # --- answers -------------------------------------------------------------------------------------------------

    def _serve(self, extra: WaitingCall | None = None) -> None:
        """Answer what other ranks ask; `extra` is a wait of this rank that its stacks no longer show."""
        mailbox = self._mailbox
        if mailbox is None:
            raise StoreGone("it was lost before")
        for number, question in mailbox.questions():
            self._asked = number
            stacks = write_stacks(self.settings.folder, question["stacks"], self.rank)
            mailbox.publish(self._witness.report(number, self._waits(extra), stacks))
            if question["over"]:
                now = time.monotonic()
                self._alert = now + self.settings.patience + 3.0
                self._silent_at = now + self.settings.patience * 0.6
        if time.monotonic() > self._silent_at:
            self._silent_at = math.inf
            self._tell_of_silent(mailbox, extra)

    def _tell_of_silent(self, mailbox: WatchStore, extra: WaitingCall | None) -> None:
        """Ranks of this host that did not answer either are told of by us."""
        neighbours = self._witness.neighbours
        if neighbours is None:
            return
        told = mailbox.reports(neighbours.found)
        silent = [rank for rank in neighbours.found if rank not in told or told[rank].asked < self._asked]
        if silent:
            own = self._witness.report(self._asked, self._waits(extra))
            seen = {rank: neighbours.found[rank].report(silent=True) for rank in silent}
            mailbox.publish(replace(own, seen={**own.seen, **seen}))

    def _hear(self) -> None:
        """Take note of the newest verdict: the store may end with the rank that gave it."""
        if self._mailbox is None or time.monotonic() > self._alert:
            return
        found = self._mailbox.verdict()
        if found is not None and self._is_news(found):
            self._heard = found
            self._alert = 0.0
            self._mailbox.add(f"heard/{found['incident']}")

    def _is_news(self, verdict: dict[str, Any]) -> bool:
        """A verdict explains what fails soon after it, as ranks that gave up end and break connections."""
        timeout = self.settings.timeout or seconds_of(td.GroupMember.WORLD)
        young = abs(time.time() - verdict["at"]) < timeout + _YOUNG
        return young and verdict["incident"] not in self._used

    # --- questions -----------------------------------------------------------------------------------------------

    def _warn(self, one: ActiveCall, age: float) -> None:
        """Tell of a call that takes long, once, on one rank."""
        if (
            age < self.settings.warns_after(self.limit(one.call.group))
            or one.key in self._told
            or self._mailbox is None
        ):
            return
        self._told.add(one.key)
        wait = WaitingCall(one.call, one.ranks, age, one.place)
        if self._mailbox.add(f"warned/{incident_of(wait)}") == 1:
            found = self._inquiry(hurry=True).decide(wait, over=False)
            # What was launched may well be done: only a rank that is behind shows that it is not.
            still = [*insides(self._finders), *(last_launched(self._entries()) if found["ranks"] else ())]
            # A call that has failed meanwhile cut the inquiry short, and gets a verdict of its own.
            if one.key in {other.key for other in still} and self._jobs.empty():
                logger.warning("%s has not completed for %.0f s: %s", one.call, age, found["text"])

    def _give_up(self, one: ActiveCall, age: float) -> None:
        """End what a device would wait for until torch ends the process without a word."""
        limit, key = self.limit(one.call.group), ("gave up", one.key)
        if age < limit - min(limit / 10, _BEFORE_TORCH) or key in self._told or self._mailbox is None:
            return
        self._told.add(key)
        wait = WaitingCall(one.call, one.ranks, age, one.place)
        if self._inquiry(hurry=True).decide(wait, over=False)["ranks"]:
            interrupt(f"{one.call} did not complete: {self._explained(wait).text}")
            self._linger()

    def _inquiry(self, *, hurry: bool) -> Inquiry:
        assert self._mailbox is not None, "there is a store"
        stop = (lambda: not self._jobs.empty()) if hurry else (lambda: False)
        return Inquiry(self._mailbox, self._witness, self.settings.patience, self._serve, stop)

    def _explained(self, wait: WaitingCall) -> HangVerdict:
        found = None
        with self._lost_store():
            found = self._asked_for(wait)
        if found is None:
            return self._judged_by_eye(wait, "is gone")
        verdict = HangVerdict(tuple(found["ranks"]), found["text"])
        tell_launcher(self.rank, verdict.ranks, verdict.text)
        return verdict

    def _judged_by_eye(self, wait: WaitingCall, store: str) -> HangVerdict:
        found = judge_by_eye(wait, self._witness.report(0, [wait]), self._witness)
        tell_launcher(self.rank, found.ranks, found.text)
        return replace(found, text=f"{found.text}{self._store_words(store)}")

    def _asked_for(self, wait: WaitingCall) -> dict[str, Any] | None:
        """The verdict, by whoever gives it: heard already, given by another rank, or ours."""
        mailbox = self._mailbox
        if mailbox is None:
            return self._known()
        newest = mailbox.verdict()
        if newest is not None and self._is_news(newest):
            self._heard = newest
        if (known := self._known()) is not None:
            return known
        incident = incident_of(wait)
        if mailbox.add(f"claim/{incident}") == 1:
            found = self._inquiry(hurry=False).decide(wait, over=True)
            mailbox.decide(incident, found)
            self._used.add(incident)
            self._given = (incident, found["answered"])
            return found
        until = time.monotonic() + self.settings.patience + _MORE
        while (other := mailbox.verdict(incident)) is None and time.monotonic() < until:
            self._serve(wait)
            time.sleep(_QUICK / 2)
        self._used.add(incident)
        if other is None:
            return self._inquiry(hurry=True).decide(wait, over=True)
        mailbox.add(f"heard/{incident}")
        return other

    def _known(self) -> dict[str, Any] | None:
        heard, self._heard = self._heard, None
        if heard is None or not self._is_news(heard):
            return None
        self._used.add(heard["incident"])
        return heard

    def _linger(self) -> None:
        """The rank that keeps the store stays until the others have heard: its end is the end of the store.

        The end of the program waits for this thread, not much longer."""
        (incident, answered), self._given = self._given, ("", 0)
        until = time.monotonic() + (1.5 if incident else 0.0)
        while self.rank == 0 and self._home is not None and time.monotonic() < until and self._mailbox is not None:
            self._serve()
            if int(self._mailbox.find(f"heard/{incident}") or 0) >= answered - 1:
                return
            time.sleep(_QUICK / 2)

    def _store_words(self, state: str) -> str:
        if self._home is None:
            return ""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeper = "the launcher's agent" if agent else "rank 0"
        return (
            f"; the job's store at {self._home[0]}:{self._home[1]}, which {keeper} keeps, {state}: that process has "
            "ended or is stopped, or its host cannot be reached"
        )


def _limit(name: str) -> float:
    """Seconds that an operation of this group may take."""
    world = td.GroupMember.WORLD
    found = next((group for group, known in tuple(c10d._world.pg_names.items()) if known == name), world)
    return seconds_of(found)
