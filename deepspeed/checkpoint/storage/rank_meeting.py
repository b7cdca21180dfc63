"""How ranks exchange values while they save: who takes part, what each found, which rank failed or died.

[Note: meetings] Ranks communicate through the job's key-value store, on the host: this works with any backend, from any
thread, and when the device hangs. A meeting is a series of steps. At each step every rank writes a value; rank 0
collects them and writes the list for all. A rank that takes part counts up a key every second. A rank whose key does
not change for `wait` seconds is absent: it never came, or it died. The ranks that wait for it raise an error.
The meeting's number lives in the store. Rank 0 raises it when a meeting opens or fails to open, so that ranks that gave
up agree about the next one. Keys are removed once read; the result of the last step stays until the next meeting.

[Note: late or gone] A rank may come late for good reasons, such as rank 0 writing a model for export before all ranks
save. It is waited for. A rank that did not call what the others called goes on to collectives that wait for the others,
who wait for it. So ranks that have waited for a while ask the missing ones how many collectives they have begun in each
process group. The thread of the hang watch answers, through the store. A rank that is ahead of the asking rank has gone
on; a rank that does not answer has ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from deepspeed import comm
from deepspeed.comm.watch.threads import positions
from deepspeed.errors import CheckpointError, DeepSpeedError, UsageError
from deepspeed.log import logger

T = TypeVar("T")
WAIT = 10.0
PATIENCE = 60
"""A busy rank is waited for this many times `wait`."""


class SingleRank:
    """The exchange of a job of one process; also its own meeting."""

    rank = 0
    world = 1

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[RankMeeting]:
        """No other rank takes part."""
        yield self

    def gather(self, value: Any) -> list[Any]:
        """Only this rank's value, as JSON would have carried it."""
        return [json.loads(json.dumps(value))]

    def close(self) -> None:
        """Nothing to end."""


class StoreExchange:
    """Ranks that meet in a store of torch.distributed; with `late`, a rank that is merely late is waited for.

    `connect` makes the connection for meetings, at the first one: it can take seconds. It must not be one on which
    other code blocks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        wait: float = WAIT,
        late: bool = False,
        connect: Callable[[], Store] | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.wait = wait
        self.late = late
        self._connect = connect or (lambda: store)
        # Each rank counts its exchanges in the store itself: equal numbers belong together if all ranks make them in
        # the same order, as they make engines.
        with _store_errors("an exchange between ranks"):
            self.root = f"deepspeed/exchange/{store.add(f'deepspeed/exchanges/{rank}', 1)}"
        self.stale: list[str] = []
        """Keys that all ranks have read once the next meeting is open; rank 0 removes them."""
        self._last_left = -1  # the number of the last meeting that this rank has left
        self._answered = 0
        self._closed = False

    @functools.cached_property
    def store(self) -> Store:
        """The connection of the meetings."""
        return self._connect()

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[RankMeeting]:
        """Open a meeting about `what`, words for error messages; all ranks do so in the same order.

        This rank counts as alive until the block is left.
        """
        with _store_errors(what):
            number = self.store.add(f"{self.root}/number", 0)
            meeting = StoreMeeting(self, number, what)
        try:
            yield meeting
        finally:
            self._last_left = number
            meeting.close()

    def answer(self, store: Store) -> None:
        """Answer ranks that ask how far this one is; called from the thread of the hang watch, with its connection."""
        key = f"{self.root}/asked/{self.rank}"
        if self._closed or not store.check([key]):
            return
        asked = store.add(key, 0)
        if asked != self._answered:
            store.set(f"{self.root}/answer/{self.rank}", json.dumps([asked, self._last_left, positions()]))
            self._answered = asked

    def close(self) -> None:
        """Stop answering."""
        self._closed = True


RankExchange = SingleRank | StoreExchange


class _Missing(DeepSpeedError):
    """Rank 0 has waited for ranks that did not come."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(str(ranks))
        self.ranks = ranks


class StoreMeeting:
    """The steps of one save or load."""

    def __init__(self, exchange: StoreExchange, number: int, what: str) -> None:
        self._exchange = exchange
        self._store = exchange.store
        self._rank, self._wait = exchange.rank, exchange.wait
        self._number = number
        self._root = f"{exchange.root}/{number}"
        self._positions = positions()
        self._what = what
        self._step = 0
        self._began = time.monotonic()
        self._logged = 0.0
        self._opened = False
        self._check_every = min(1.0, self._wait / 4)  # seconds between looks at who is alive
        self._left = threading.Event()
        self._counted: dict[int, tuple[int, float]] = {}
        """What each rank's key held, and since when."""
        self._asked: dict[int, int] = {}
        """The question to a rank that it has not answered yet."""
        self._will_come: dict[int, float] = {}
        """When ranks that have not come answered that they are only late."""
        self._store.add(self._alive_key(self._rank), 1)
        self._heartbeat = threading.Thread(target=self._count, name="checkpoint-alive", daemon=True)
        self._heartbeat.start()

    def gather(self, value: Any) -> list[Any]:
        """Give a JSON value; returns those of all ranks, by rank."""
        with _store_errors(self._what):
            own, result = self._key(self._rank), self._key("all")
            self._store.set(own, json.dumps(value))
            try:
                if self._rank == 0:
                    self._lead(result)
                else:
                    self._wait_for({0: result})
                found = json.loads(self._store.get(result))
            finally:
                self._store.delete_key(own)
        self._step += 1
        if "absent" in found:
            raise self._absent(found["absent"])
        self._opened = True
        values: list[Any] = found["all"]
        return values

    def _lead(self, result: str) -> None:
        """Collect the values of all ranks and write the list."""
        keys = {rank: self._key(rank) for rank in range(self._exchange.world)}
        try:
            self._wait_for(keys)
            found = {"all": [json.loads(self._store.get(key)) for key in keys.values()]}
        except _Missing as missing:
            found = {"absent": missing.ranks}
        for key in self._exchange.stale:
            self._store.delete_key(key)
        self._exchange.stale = [result]
        if self._step == 0:
            self._store.add(f"{self._exchange.root}/number", 1)
        self._store.set(result, json.dumps(found))

    def _wait_for(self, keys: dict[int, str]) -> None:
        """Until the keys of these ranks exist; an error if a rank whose key is missing shows no sign of life."""
        began = looked = now = time.monotonic()
        while not self._store.check(list(keys.values())):
            # The longer it takes, the less one more pause matters, and the store serves all ranks.
            time.sleep(min(max((now - began) / 50, 0.0005), 0.05))
            now = time.monotonic()
            if now - looked > self._check_every:
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                if self._exchange.late and not self._opened:
                    self._ask(missing)
                    self._log(missing, now - began)
                looked = now = time.monotonic()
                lost = [rank for rank in missing if now - max(began, self._last_sign(rank, now)) > self._wait]
                if lost:
                    self._give_up(lost)

    def _ask(self, missing: list[int]) -> None:
        """Ask ranks that have not come whether they are only late."""
        now, root = time.monotonic(), self._exchange.root
        for rank in missing:
            # No more often than necessary: where all wait for rank 0, thousands ask it.
            recent = max(self._began, self._will_come.get(rank, 0.0)) > now - self._wait / 4
            if recent or self._store.check([self._alive_key(rank)]):
                continue
            if rank not in self._asked:
                self._asked[rank] = self._store.add(f"{root}/asked/{rank}", 1)
            elif self._store.check([f"{root}/answer/{rank}"]):
                question, last_left, theirs = json.loads(self._store.get(f"{root}/answer/{rank}"))
                if question >= self._asked[rank]:
                    del self._asked[rank]
                    busy = now - self._began < PATIENCE * self._wait and last_left < self._number
                    self._will_come[rank] = now if busy and not is_ahead(theirs, self._positions) else 0.0

    def _log(self, missing: list[int], waited: float) -> None:
        """Log once in a while which ranks are missing, on one or two ranks."""
        if waited > self._logged + self._wait and self._rank in (0, min({0, 1} - set(missing), default=0)):
            self._logged = waited
            logger.warning("%s: waiting for ranks %s, %.0f s so far", self._what, missing, waited)

    def _give_up(self, lost: list[int]) -> None:
        if self._rank == 0:
            raise _Missing(lost)
        if not self._opened:  # rank 0, which would know who came, did not
            lost = [rank for rank in range(self._exchange.world) if not self._store.check([self._alive_key(rank)])]
            time.sleep(self._check_every)  # so that others see this rank before it leaves
        raise self._absent(lost)

    def _absent(self, ranks: Sequence[int]) -> CheckpointError:
        who = f"{_name(ranks)} of {self._exchange.world}"
        where, wait = f"rank {self._rank}: {self._what}", f"{self._wait:g} s"
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
        """This rank takes part no longer."""
        self._left.set()
        self._heartbeat.join()
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(self._alive_key(self._rank))

    def _key(self, who: int | str) -> str:
        return f"{self._root}/{self._step}/{who}"

    def _alive_key(self, rank: int) -> str:
        return f"{self._root}/alive/{rank}"

    def _last_sign(self, rank: int, now: float) -> float:
        """When this rank has last shown that it takes part, or will."""
        key = self._alive_key(rank)
        if not self._store.check([key]):
            return self._will_come.get(rank, 0.0)
        # Not `get`, which would wait for the key if the rank leaves in this moment.
        count = self._store.add(key, 0)
        if rank not in self._counted or self._counted[rank][0] != count:
            self._counted[rank] = (count, now)
        return self._counted[rank][1]

    def _count(self) -> None:
        while not self._left.wait(min(1.0, self._wait / 8)):
            try:
                self._store.add(self._alive_key(self._rank), 1)
            except RuntimeError:  # the store is gone, which the next step reports
                return


RankMeeting = SingleRank | StoreMeeting


def is_ahead(theirs: dict[str, int], ours: dict[str, int]) -> bool:
    """Whether another rank has begun a collective that this one has not."""
    return any(theirs.get(name, 0) > count for name, count in ours.items())


@contextlib.contextmanager
def _store_errors(what: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise CheckpointError(
            f"{what}: the job's store cannot be reached: {str(error).splitlines()[0]}. "
            "The process that holds it (rank 0, or the launcher's agent) has probably ended."
        ) from error


def default_exchange(wait: float = WAIT, *, late: bool = False) -> RankExchange:
    """The exchange of this job's ranks; made by all ranks in the same order, and closed."""
    # The ranks of torch's fake backend are this process alone.
    if not comm.is_initialized() or comm.get_world_size() == 1 or dist.get_backend() == "fake":
        return SingleRank()
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    watch = comm.dispatcher.watch
    assert watch is not None, "the process's dispatcher is watched"
    exchange = StoreExchange(
        store, comm.get_rank(), comm.get_world_size(), wait=wait, late=late, connect=watch.connection
    )
    if late:
        watch.let_answer(exchange)
    return exchange


def on_all_ranks(meeting: RankMeeting, what: str, act: Callable[[], T]) -> tuple[T, list[Any]]:
    """Call `act` on every rank; if it fails on any, a CheckpointError on all that names the rank and the reason.

    Returns this rank's result and those of all ranks as JSON.
    """
    try:
        result = act()
    except UsageError as error:  # the caller's own mistake keeps its type where it was made
        meeting.gather({"error": str(error)})
        raise
    except (DeepSpeedError, OSError) as error:
        raise _failed(what, meeting.gather({"error": str(error)})) from error
    except Exception as error:
        meeting.gather({"error": f"{type(error).__name__}: {error}"})
        raise
    found = meeting.gather({"value": result})
    if any("error" in answer for answer in found):
        raise _failed(what, found)
    return result, [answer["value"] for answer in found]


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _failed(what: str, found: Sequence[dict[str, Any]]) -> CheckpointError:
    failed: dict[str, list[int]] = {}
    for rank, answer in enumerate(found):
        if "error" in answer:
            failed.setdefault(answer["error"], []).append(rank)
    reasons = "; ".join(f"{_name(ranks)}: {text}" for text, ranks in failed.items())
    return CheckpointError(f"{what} failed. {reasons}")
