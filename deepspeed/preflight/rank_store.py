"""A store at rank 0 in which ranks leave messages before there is a process group, and who has come to it.

A process group forms only when all ranks are there, and waits in silence. Here every rank leaves its message when it is
ready, so that rank 0 knows who is absent when the time is up.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from deepspeed.comm.discover import RankFacts
from deepspeed.errors import RendezvousError

_PATIENCE = 3600.0  # seconds for rank 0 to answer; where it ends instead, its store does, too, and the wait is over
_LEAVE_AFTER = 1.0
_LOOK = 0.02


class RankStore:
    """The messages of all ranks, by subject."""

    def __init__(self, facts: RankFacts, timeout: float) -> None:
        self.rank, self.world = facts.rank, facts.world_size
        self.timeout = timeout
        self.answered = 0
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"deepspeed.preflight/{restart}", _open(facts, timeout))

    def post(self, subject: str, message: Any) -> None:
        """Leave this rank's message."""
        self.store.set(f"{subject}/{self.rank}", json.dumps(message))
        self.store.add(f"{subject}/came", 1)

    def collect(self, subject: str, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """The messages of those `ranks`, or of all, that came in time; waits no longer than for the last of them."""
        keys = {rank: f"{subject}/{rank}" for rank in (range(self.world) if ranks is None else ranks)}
        # One number for as long as too few have come; then each, since one who came late may be among them.
        self._wait(
            lambda: int(self.store.add(f"{subject}/came", 0)) >= len(keys) and bool(self.store.check([*keys.values()]))
        )
        found = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        self.answered = len(found)
        return found

    def decide(self, subject: str, message: Any) -> None:
        """Leave rank 0's message for all."""
        self.store.set(f"{subject}/decided", json.dumps(message))

    def decided(self, subject: str) -> Any:
        """Rank 0's message for all; an error if there is none."""
        key = f"{subject}/decided"
        try:
            self.store.wait([key], timedelta(seconds=_PATIENCE))
            return json.loads(self.store.get(key))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {self.rank}: rank 0 has ended without a word; look at what it wrote"
            ) from error

    def close(self) -> None:
        """Wait on rank 0, which keeps the store, until the ranks that answered last have read the end."""
        self._wait(lambda: int(self.store.add("left", 0)) >= self.answered - 1)

    def leave(self, status: int) -> None:
        """Let every other rank end after rank 0 where that fails: a launcher names the one that fails first."""
        self.store.add("left", 1)
        if status:
            time.sleep(_LEAVE_AFTER)

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout
        while not done() and time.monotonic() < deadline:
            time.sleep(_LOOK)


def _open(facts: RankFacts, timeout: float) -> Store:
    if facts.world_size == 1:
        return HashStore()
    assert facts.master_addr is not None, "a job of several ranks has an address"
    assert facts.master_port is not None, "a job of several ranks has a port"
    # torchrun keeps the store itself; all ranks come as guests.
    keep = facts.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=timeout)
    try:
        return TCPStore(facts.master_addr, facts.master_port, is_master=keep, timeout=limit, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        place = f"{facts.master_addr}:{facts.master_port}"
        what = f"rank 0 cannot listen at {place}: {str(error).splitlines()[0]}. Another job may: choose another port"
        if not keep:
            what = (
                f"rank {facts.rank} found nobody at {place} within {timeout:.0f} s: rank 0 was not started, or its "
                "host cannot be reached from here at that address and port (MASTER_ADDR, MASTER_PORT, a firewall)"
            )
        raise RendezvousError(what) from error


def absent_words(absent: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Where absent ranks should be, as far as their neighbours show it."""
    places = set()
    for rank in absent:
        before = max((there for there in hosts if there < rank), default=None)
        after = min((there for there in hosts if there > rank), default=None)
        if before is not None and after is not None and hosts[before] == hosts[after]:
            places.add(hosts[before])
    return f"; going by the ranks beside, on {', '.join(sorted(places))}" if 0 < len(places) <= 4 else ""
