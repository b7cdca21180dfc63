"""Where ranks meet before there is a process group: a store at rank 0, and who has come to it.

A process group forms only when everybody is there, and waits in silence. Here every rank leaves its word in a store of
its own accord, so that rank 0 knows who is absent when the time is up.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from deepspeed.comm.discover import RankFacts
from deepspeed.errors import RendezvousError

_PATIENCE = 3600.0  # seconds for rank 0 to speak; where it ends instead, its store does, too, and the wait is over
_FAREWELL = 1.0
_LOOK = 0.02


class RankStore:
    """The words of all ranks, by subject."""

    def __init__(self, facts: RankFacts, timeout: float) -> None:
        self.rank, self.world = facts.rank, facts.world_size
        self.timeout = timeout
        self.heard = 0
        self.store = PrefixStore(_prefix(os.environ), _open(facts, timeout))

    def say(self, subject: str, words: Any) -> None:
        """Leave this rank's words."""
        self.store.set(f"{subject}/{self.rank}", json.dumps(words))
        self.store.add(f"{subject}/came", 1)

    def hear_all(self, subject: str, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """The words of those `ranks`, or of all, that came in time; waits no longer than for the last of them."""
        keys = {rank: f"{subject}/{rank}" for rank in (range(self.world) if ranks is None else ranks)}
        deadline = time.monotonic() + self.timeout
        while not self._all_came(subject, list(keys.values())) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        found = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        self.heard = len(found)
        return found

    def _all_came(self, subject: str, keys: list[str]) -> bool:
        # One number for as long as too few have come; then each, since one who came late may be among them.
        return int(self.store.add(f"{subject}/came", 0)) >= len(keys) and bool(self.store.check(keys))

    def decide(self, subject: str, words: Any) -> None:
        """What rank 0 tells all."""
        self.store.set(f"{subject}/decided", json.dumps(words))

    def decided(self, subject: str) -> Any:
        """What rank 0 tells; an error if it does not."""
        key = f"{subject}/decided"
        try:
            self.store.wait([key], timedelta(seconds=_PATIENCE))
            return json.loads(self.store.get(key))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {self.rank}: rank 0 has ended without a word; look at what it wrote"
            ) from error

    def part(self) -> None:
        """Rank 0, which keeps the store, leaves when those who answered last have heard the end."""
        deadline = time.monotonic() + self.timeout
        while int(self.store.add("parted", 0)) < self.heard - 1 and time.monotonic() < deadline:
            time.sleep(_LOOK)

    def follow_out(self, status: int) -> None:
        """Every other rank leaves after rank 0 where that fails: a launcher names who fails first."""
        self.store.add("parted", 1)
        if status:
            time.sleep(_FAREWELL)


def _prefix(env: Mapping[str, str]) -> str:
    return f"deepspeed.preflight/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _open(facts: RankFacts, timeout: float) -> Store:
    if facts.world_size == 1:
        return HashStore()
    assert facts.master_addr is not None, "a job of several ranks knows where to meet"
    assert facts.master_port is not None, "a job of several ranks knows where to meet"
    # torchrun keeps the store itself; all ranks come as guests.
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            facts.master_addr,
            facts.master_port,
            is_master=facts.rank == 0 and not kept,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        place = f"{facts.master_addr}:{facts.master_port}"
        if facts.rank == 0 and not kept:
            what = (
                f"rank 0 cannot listen at {place}: {str(error).splitlines()[0]}. Another job may: choose another port"
            )
        else:
            what = (
                f"rank {facts.rank} found nobody at {place} within {timeout:.0f} s: rank 0 was not started, or its "
                "host cannot be reached from here at that address and port (MASTER_ADDR, MASTER_PORT, a firewall)"
            )
        raise RendezvousError(what) from error


def absent_words(absent: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Where absent ranks should be, as far as those beside them show it."""
    if not hosts:
        return ""
    places = set()
    for rank in absent:
        before = max((there for there in hosts if there < rank), default=None)
        after = min((there for there in hosts if there > rank), default=None)
        if before is not None and after is not None and hosts[before] == hosts[after]:
            places.add(hosts[before])
    if not places or len(places) > 4:
        return ""
    return f"; going by the ranks beside, on {', '.join(sorted(places))}"
