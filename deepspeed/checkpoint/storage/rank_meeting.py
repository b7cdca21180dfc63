"""How ranks learn of each other while they save: who came, what each says, who failed, who died.

[Note: meetings] Ranks talk through the job's key-value store, on the host: that works beside any backend, from any
thread and when the device hangs. A meeting is a numbered series of steps. At each step every rank says something, rank
0 collects and tells everybody all of it. While a rank takes part it renews a key of its own every second. A rank whose
key does not change for `wait` seconds is absent: it never came, or it died; those who wait for it say so and stop.
The meeting's number lives in the store and is raised by rank 0 when a meeting opens or fails to, so that ranks which
gave up agree about the next one. Keys are removed once read; what the last step says stays until the next meeting.
With `answering` a rank that has not come is not absent as long as it is merely busy.

[Note: busy or gone] A rank may come late for good reasons, such as rank 0 writing a model for export before all ranks
save. It will come, and is waited for. A rank that did not call what the others called goes on: it takes part in
collectives that wait for the others, who wait for it. So where ranks have waited for a while, they ask those that are
missing: a thread of each tells how many collectives it has begun in each process group. One that is ahead of the rank
that waits has gone on; one that does not answer has ended. Each rank listens at a port of its own, whose place it
leaves in the job's store, and between saves it does no more than that. A thread that waited in the store would need a
connection of its own, fills the log with torch's traces when the store ends before it, and polls where the store is a
file.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from deepspeed import comm
from deepspeed.comm.watch.threads import positions
from deepspeed.errors import CheckpointError, DeepSpeedError, UsageError
from deepspeed.log import logger

_LOOPBACK = "127.0.0.1"
_SLOW = 5.0  # seconds that somebody who asks may take to read
_PAUSE = 0.1
_AT_ONCE = 32  # ranks that are asked at the same time


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank tells about itself."""

    left: int
    """The last meeting that it has left."""
    positions: dict[str, int]


def is_ahead(theirs: dict[str, int], ours: dict[str, int]) -> bool:
    """Whether another rank has begun a collective that this one has not."""
    return any(theirs.get(name, 0) > count for name, count in ours.items())


def ask(store: KeyValueStore, root: str, ranks: Sequence[int], patience: float) -> dict[int, Answer]:
    """The answers of ranks, by rank; of those alone that answer within `patience` seconds."""
    keys = {rank: _key(root, rank) for rank in ranks}
    places: dict[int, tuple[str, int]] = {
        rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])
    }
    if not places:
        return {}
    with ThreadPoolExecutor(min(len(places), _AT_ONCE)) as pool:
        answers = pool.map(lambda place: _ask(place, patience), places.values())
    return {rank: answer for rank, answer in zip(places, answers, strict=True) if answer is not None}


class Answering:
    """A thread that waits to be asked how far this rank is."""

    def __init__(self, store: KeyValueStore, root: str, rank: int) -> None:
        self.left = -1
        """The last meeting that this rank has left."""
        ours, theirs = socket.socketpair()
        self._thread = threading.Thread(
            target=_answer, args=(weakref.ref(self), theirs, store, _key(root, rank)), daemon=True
        )
        self._thread.name = "checkpoint-liveness"
        self._thread.start()
        # Also at the end of the program: a thread in the middle of a call must not meet an interpreter that is gone.
        self._end = weakref.finalize(self, _end, os.getpid(), ours, self._thread)

    def close(self) -> None:
        """End the thread."""
        self._end()


def _end(process: int, bell: socket.socket, thread: threading.Thread) -> None:
    if os.getpid() != process:  # a forked child, which has neither the thread nor the right to end it
        return
    with contextlib.suppress(OSError):  # it has ended already
        bell.send(b"e")
    if thread is not threading.current_thread():
        thread.join(timeout=5)
    bell.close()


def _answer(owner: weakref.ref[Answering], bell: socket.socket, store: KeyValueStore, key: str) -> None:
    with bell, contextlib.ExitStack() as stack:
        try:
            # In this thread, because names may take seconds to resolve.
            listener = stack.enter_context(_listen())
            store.set(key, json.dumps([_address(store), listener.getsockname()[1]]))
        except (OSError, RuntimeError) as error:  # no sockets here; or the store is gone, with all who could ask
            logger.debug("nobody can ask this rank whether it will come to a save: %s", error)
            return
        while bell not in wait([listener, bell]):
            try:
                asking, _ = listener.accept()
                with asking:
                    asking.settimeout(_SLOW)
                    alive = owner()
                    if alive is None:
                        return
                    told = {"left": alive.left, "positions": positions()}
                    del alive
                    asking.sendall(json.dumps(told).encode())
            except OSError:  # whoever asked is gone; or there are no descriptors left, of which one may come back
                wait([bell], _PAUSE)


def _ask(place: tuple[str, int], patience: float) -> Answer | None:
    address, port = place
    host = _LOOPBACK if address == socket.gethostname() else address  # which need not resolve on its own host
    try:
        with socket.create_connection((host, port), timeout=patience) as told, told.makefile("rb") as text:
            return Answer(**json.loads(text.read()))
    except (OSError, ValueError, TypeError):  # not there, ended in the middle of its answer, or a stranger
        return None


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    else:
        listener = socket.create_server(("", 0), backlog=1024)
    listener.setblocking(False)  # somebody who has already gone again must not hold the thread in `accept`
    return listener


def _address(store: Any) -> str:
    """By what name or number the other ranks reach this host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return socket.gethostname()
    home: str = store.host
    try:
        family, kind, _, _, there = socket.getaddrinfo(home, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing, but chooses the address from which we reach the store's host
            address: str = probe.getsockname()[0]
    except OSError:
        return home
    # Who reaches it by a loopback address is on that host, which others know by the store's name.
    return home if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address


def _key(root: str, rank: int) -> str:
    return f"{root}/at/{rank}"


T = TypeVar("T")
WAIT = 10.0
PATIENCE = 60
"""So many times `wait` is a rank waited for that is busy."""


class KeyValueStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Write a key."""

    def get(self, key: str, /) -> bytes:
        """Read a key that exists."""

    def check(self, keys: list[str], /) -> bool:
        """Do all of these exist."""

    def add(self, key: str, amount: int, /) -> int:
        """Raise a number and return it."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class RankMeeting(Protocol):
    """The steps of one save or load."""

    def say(self, value: Any) -> list[Any]:
        """Tell the others a JSON value and hear everybody's, by rank."""


class RankExchange(Protocol):
    """Where ranks meet."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world(self) -> int:
        """How many ranks meet."""

    def meeting(self, what: str) -> contextlib.AbstractContextManager[RankMeeting]:
        """Open a meeting about `what`, words for error messages; all ranks do so in the same order."""

    def close(self) -> None:
        """There will be no more meetings."""


class SingleRank:
    """The exchange of a job of one process; also its own meeting."""

    rank = 0
    world = 1

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[RankMeeting]:
        """Nobody else comes."""
        yield self

    def say(self, value: Any) -> list[Any]:
        """Only this rank's value, as JSON would have carried it."""
        return [json.loads(json.dumps(value))]

    def close(self) -> None:
        """Nothing to end."""


class StoreExchange:
    """Ranks that meet in a store of torch.distributed."""

    def __init__(
        self, store: KeyValueStore, rank: int, world: int, *, wait: float = WAIT, answering: bool = False
    ) -> None:
        self.rank = rank
        self.world = world
        self.wait = wait
        self._shared = store
        # Each rank counts its exchanges in the store itself: equal numbers belong together if all ranks make them in
        # the same order, as they make engines.
        with _store_errors("an exchange between ranks"):
            self.root = f"deepspeed/exchange/{store.add(f'deepspeed/exchanges/{rank}', 1)}"
        self.stale: list[str] = []
        """Keys that everybody has read once the next meeting is open; rank 0 removes them."""
        self.answering = Answering(store, self.root, rank) if answering else None

    @functools.cached_property
    def store(self) -> KeyValueStore:
        """A connection of our own where torch can make one, at the first meeting: it can take seconds.

        Whoever waits in the store holds up all who share a connection.
        """
        own: KeyValueStore = getattr(self._shared, "clone", lambda: self._shared)()
        return own

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[RankMeeting]:
        """Open a meeting; the rank's sign of life goes on until the block is left."""
        with _store_errors(what):
            number = self.store.add(f"{self.root}/number", 0)
            room = _Room(self, number, what)
        try:
            yield room
        finally:
            if self.answering is not None:
                self.answering.left = number
            room.close()

    def close(self) -> None:
        """Answer no more."""
        if self.answering is not None:
            self.answering.close()


class _Room:
    """One meeting in a store."""

    def __init__(self, exchange: StoreExchange, number: int, what: str) -> None:
        self._exchange = exchange
        self._store = exchange.store
        self._number = number
        self._root = f"{exchange.root}/{number}"
        self._positions = positions() if exchange.answering is not None else {}
        self._told = 0.0
        self._what = what
        self._step = 0
        self._began = time.monotonic()
        self._opened = False
        self._glance = min(1.0, exchange.wait / 4)  # seconds between looks for signs of life
        self._left = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._answered: dict[int, float] = {}
        """When ranks that have not come said that they will."""
        self._beat(0)
        self._alive = threading.Thread(target=self._live, name="checkpoint-alive", daemon=True)
        self._alive.start()

    def say(self, value: Any) -> list[Any]:
        with _store_errors(self._what):
            mine, result = self._key(self._exchange.rank), self._key("all")
            self._store.set(mine, json.dumps(value))
            try:
                if self._exchange.rank == 0:
                    self._lead(result)
                else:
                    self._wait_for({0: result}, [0])
                heard = json.loads(self._store.get(result))
            finally:
                self._store.delete_key(mine)
        self._step += 1
        if "absent" in heard:
            raise self._absent(heard["absent"])
        self._opened = True
        values: list[Any] = heard["all"]
        return values

    def _lead(self, result: str) -> None:
        """Collect what everybody says and post it."""
        ranks = range(self._exchange.world)
        keys = {rank: self._key(rank) for rank in ranks}
        try:
            self._wait_for(keys, list(ranks))
            values = [json.loads(self._store.get(keys[rank])) for rank in ranks]
            posted = json.dumps({"all": values})
        except _Missing as missing:
            posted = json.dumps({"absent": missing.ranks})
        for key in self._exchange.stale:
            self._store.delete_key(key)
        self._exchange.stale = [result]
        if self._step == 0:
            self._store.add(f"{self._exchange.root}/number", 1)
        self._store.set(result, posted)

    def _wait_for(self, keys: dict[int, str], ranks: list[int]) -> None:
        """Until all keys exist; CheckpointError if a rank that owes one shows no sign of life."""
        began = looked = now = time.monotonic()
        while not self._store.check(list(keys.values())):
            # The longer it takes, the less a pause more matters, and the store serves all ranks.
            time.sleep(min(max((now - began) / 50, 0.0005), 0.05))
            now = time.monotonic()
            if now - looked > self._glance:
                owing = [rank for rank in ranks if not self._store.check([keys[rank]])]
                if not self._opened and self._exchange.answering is not None:
                    self._ask(owing)
                    self._tell(owing, now - began)
                looked = now = time.monotonic()
                lost = [rank for rank in owing if now - max(began, self._last_sign(rank, now)) > self._exchange.wait]
                if lost:
                    self._give_up(lost)

    def _ask(self, owing: list[int]) -> None:
        """Let ranks that have not come say whether they will."""
        # No more often than it takes: where all wait for rank 0, thousands ask it.
        late = time.monotonic() - self._exchange.wait / 2
        silent = [rank for rank in owing if max(self._began, self._answered.get(rank, 0.0)) < late]
        silent = [rank for rank in silent if not self._store.check([self._alive_key(rank)])]
        answers = ask(self._store, self._exchange.root, silent, self._exchange.wait)
        now = time.monotonic()
        for rank in silent:
            self._answered[rank] = now if rank in answers and self._will_come(answers[rank], now) else 0.0

    def _will_come(self, answer: Answer, now: float) -> bool:
        """It has neither left already nor gone on without us, nor been busy for too long."""
        waited = now - self._began > PATIENCE * self._exchange.wait
        return answer.left < self._number and not is_ahead(answer.positions, self._positions) and not waited

    def _tell(self, owing: list[int], waited: float) -> None:
        """Say once in a while for whom we wait."""
        if waited > self._told + self._exchange.wait and self._exchange.rank in (
            0,
            min({0, 1} - set(owing), default=0),
        ):
            self._told = waited
            logger.warning("%s: waiting for ranks %s, %.0f s so far", self._what, owing, waited)

    def _give_up(self, lost: list[int]) -> None:
        if self._exchange.rank == 0:
            raise _Missing(lost)
        if not self._opened:  # rank 0, which would know who came, did not: look for ourselves
            everybody = range(self._exchange.world)
            lost = [rank for rank in everybody if not self._store.check([self._alive_key(rank)])]
            time.sleep(self._glance)  # let the others see us before we go
        raise self._absent(lost)

    def _absent(self, ranks: Sequence[int]) -> CheckpointError:
        who = f"{_those(ranks)} of {self._exchange.world}"
        where, wait = f"rank {self._exchange.rank}: {self._what}", f"{self._exchange.wait:g} s"
        if self._opened:
            return CheckpointError(
                f"{where}: no sign of life from {who} for {wait}: the process ended or hangs. No checkpoint was "
                "replaced. Look at the output of that rank for the reason."
            )
        return CheckpointError(
            f"{where}: {who} did not take part within {wait}. Every rank has to call it, not only one; these have "
            "ended, or went on with something else. The time is checkpoint.rank_wait."
        )

    def close(self) -> None:
        self._left.set()
        self._alive.join()
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(self._alive_key(self._exchange.rank))

    def _key(self, who: int | str) -> str:
        return f"{self._root}/{self._step}/{who}"

    def _alive_key(self, rank: int) -> str:
        return f"{self._root}/alive/{rank}"

    def _last_sign(self, rank: int, now: float) -> float:
        """When this rank's sign of life changed last, as far as we have seen."""
        key = self._alive_key(rank)
        if not self._store.check([key]):
            return self._answered.get(rank, 0.0)
        value = self._store.get(key)
        if rank not in self._seen or self._seen[rank][0] != value:
            self._seen[rank] = (value, now)
        return self._seen[rank][1]

    def _beat(self, count: int) -> None:
        self._store.set(self._alive_key(self._exchange.rank), str(count))

    def _live(self) -> None:
        count, pause = 0, min(1.0, self._exchange.wait / 8)
        while not self._left.wait(pause):
            count += 1
            try:
                self._beat(count)
            except RuntimeError:  # the store is gone, which the next step tells
                return


class _Missing(DeepSpeedError):
    """Ranks for which rank 0 waited in vain."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(str(ranks))
        self.ranks = ranks


@contextlib.contextmanager
def _store_errors(what: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise CheckpointError(
            f"{what}: the job's store cannot be reached: {str(error).splitlines()[0]}. "
            "The process that holds it (rank 0, or the launcher's agent) has probably ended."
        ) from error


def default_exchange(wait: float = WAIT, *, answering: bool = False) -> RankExchange:
    """The exchange of this job's ranks; made by all ranks in the same order, and closed."""
    # The ranks of torch's fake backend are this process alone.
    if not comm.is_initialized() or comm.get_world_size() == 1 or dist.get_backend() == "fake":
        return SingleRank()
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    return StoreExchange(store, comm.get_rank(), comm.get_world_size(), wait=wait, answering=answering)


def on_all_ranks(meeting: RankMeeting, what: str, act: Callable[[], T]) -> tuple[T, list[Any]]:
    """Do a thing on every rank; if it fails on any, a CheckpointError on all that names the rank and the reason.

    Returns this rank's result and those of all ranks as JSON.
    """
    try:
        result = act()
    except UsageError as error:  # the caller's own mistake stays one where it was made
        meeting.say({"error": str(error)})
        raise
    except (DeepSpeedError, OSError) as error:
        raise _failed(what, meeting.say({"error": str(error)})) from error
    except Exception as error:
        meeting.say({"error": f"{type(error).__name__}: {error}"})
        raise
    heard = meeting.say({"value": result})
    if any("error" in answer for answer in heard):
        raise _failed(what, heard)
    return result, [answer["value"] for answer in heard]


def _those(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _failed(what: str, heard: Sequence[dict[str, Any]]) -> CheckpointError:
    failed: dict[str, list[int]] = {}
    for rank, answer in enumerate(heard):
        if "error" in answer:
            failed.setdefault(answer["error"], []).append(rank)
    told = "; ".join(f"{_those(ranks)}: {text}" for text, ranks in failed.items())
    return CheckpointError(f"{what} failed. {told}")
