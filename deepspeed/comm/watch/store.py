"""The job's store as the place where ranks ask and answer: a connection of the watcher's own, and its keys.

[Note: who asks whom] Nobody writes while training goes on. A rank that waits too long writes a question under the next
number; the watchers of ranks that make no progress, or look once in a while, find it and write their reports; one rank
writes the verdict. Keys are counted by worlds of the process, so that a job that ends one and begins another does not
read old ones.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as td
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from deepspeed.comm.watch.report import RankReport, as_text, from_text

_CONNECT = 3.0  # seconds


class StoreGone(Exception):
    """The store cannot be reached any more."""


def _inner(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def suits() -> bool:
    """Whether this job's ranks have a store in common: not one process, nor torch's pretended ranks."""
    if td.get_world_size() < 2 or td.get_backend() == "fake":
        return False
    return isinstance(_inner(c10d._get_default_store()), (TCPStore, FileStore))


def store_home() -> tuple[str, int] | None:
    """Address and port of the store; None where it is a file."""
    inner = _inner(c10d._get_default_store())
    return (inner.host, inner.port) if isinstance(inner, TCPStore) else None


class WatchStore:
    """Questions, reports and verdicts of one world."""

    def __init__(self, world: int) -> None:
        shared: Any = c10d._get_default_store()
        home = store_home()
        self._sentinel: socket.socket | None = None
        try:
            if home is not None:
                # A connection on which nothing is said: its end means that the store has ended. To find that out by
                # using the store would fill the log with torch's traces.
                self._sentinel = socket.create_connection(home, timeout=_CONNECT)
            self._store: Any = shared.clone() if home is not None and hasattr(shared, "clone") else shared
        except (OSError, RuntimeError) as error:
            raise StoreGone(str(error).splitlines()[0]) from error
        self._root = f"deepspeed/hangs/{world}"
        self._seen = 0

    def close(self) -> None:
        """Let go of the connection."""
        if self._sentinel is not None:
            self._sentinel.close()
        self._store = None

    def alive(self) -> bool:
        """False once the store's process has closed its end."""
        if self._sentinel is None:
            return True
        look = select.poll()  # not `select`, which knows no descriptor beyond 1023
        look.register(self._sentinel, select.POLLIN | select.POLLHUP)
        return not look.poll(0)

    def _use(self) -> Any:
        if not self.alive():
            raise StoreGone("its process has ended")
        return self._store

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        try:
            self._use().set(f"{self._root}/{key}", value)
        except RuntimeError as error:
            raise StoreGone(str(error).splitlines()[0]) from error

    def find(self, key: str) -> bytes | None:
        """A key's value, None if there is none."""
        try:
            store, full = self._use(), f"{self._root}/{key}"
            return store.get(full) if store.check([full]) else None
        except RuntimeError as error:
            raise StoreGone(str(error).splitlines()[0]) from error

    def add(self, key: str) -> int:
        """Count one more under a key."""
        try:
            return int(self._use().add(f"{self._root}/{key}", 1))
        except RuntimeError as error:
            raise StoreGone(str(error).splitlines()[0]) from error

    # --- questions -----------------------------------------------------------------------------------------------

    def ask(self, question: dict[str, Any]) -> int:
        """Ask all ranks; the number of the question."""
        number = self.add("asked")
        self.set(f"ask/{number}", json.dumps(question))
        return number

    def questions(self) -> list[tuple[int, dict[str, Any]]]:
        """Questions that this rank has not read yet."""
        found = []
        while (raw := self.find(f"ask/{self._seen + 1}")) is not None:
            self._seen += 1
            found.append((self._seen, json.loads(raw)))
        return found

    # --- reports -------------------------------------------------------------------------------------------------

    def publish(self, report: RankReport) -> None:
        """Tell how this rank is; in place of what it told before."""
        self.set(f"report/{report.rank}", as_text(report))

    def reports(self, ranks: Iterable[int]) -> dict[int, RankReport]:
        """The newest reports of those ranks that gave one."""
        found = {}
        for rank in ranks:
            raw = self.find(f"report/{rank}")
            if raw is not None:
                try:
                    found[rank] = from_text(raw)
                except (ValueError, KeyError, TypeError):  # a rank of another version
                    continue
        return found

    # --- verdicts ------------------------------------------------------------------------------------------------

    def decide(self, incident: str, verdict: dict[str, Any]) -> None:
        """Write the verdict about an incident, and that it is the newest."""
        text = json.dumps({**verdict, "incident": incident, "at": time.time()})
        self.set(f"verdict/{incident}", text)
        self.set("verdict", text)

    def verdict(self, incident: str | None = None) -> dict[str, Any] | None:
        """The verdict about an incident, or the newest of all."""
        raw = self.find("verdict" if incident is None else f"verdict/{incident}")
        return None if raw is None else json.loads(raw)
