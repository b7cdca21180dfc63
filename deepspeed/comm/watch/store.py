"""The job's store, in which ranks ask and answer: a separate connection, and its keys.

[Note: questions] No rank writes while training proceeds. A rank that waits too long writes a question under the next
number. The watchers of ranks that make no progress find it, the others look once in a while; they write reports, and
one rank writes the verdict. Keys contain the number of the process's world, so that a second world does not read those
of the first.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterable, Iterator
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


def has_shared_store() -> bool:
    """Whether this job has several ranks with a common store; torch's fake backend has not."""
    if td.get_world_size() < 2 or td.get_backend() == "fake":
        return False
    return isinstance(_inner(c10d._get_default_store()), (TCPStore, FileStore))


def store_address() -> tuple[str, int] | None:
    """Address and port of the store; None where it is a file."""
    inner = _inner(c10d._get_default_store())
    return (inner.host, inner.port) if isinstance(inner, TCPStore) else None


def connect() -> Any:
    """A new connection to the job's store, where torch can make one."""
    shared: Any = c10d._get_default_store()
    return shared.clone() if hasattr(shared, "clone") else shared


class WatchStore:
    """Questions, reports and verdicts of one world."""

    def __init__(self, world: int) -> None:
        shared: Any = c10d._get_default_store()
        address = store_address()
        self._sentinel: socket.socket | None = None
        try:
            if address is not None:
                # An idle connection: its end means that the store has ended. To find that out by using the store would
                # fill the log with torch's traces.
                self._sentinel = socket.create_connection(address, timeout=_CONNECT)
            self._store: Any = shared if address is None else connect()
        except (OSError, RuntimeError) as error:
            raise StoreGone(str(error).splitlines()[0]) from error
        self._root = f"deepspeed/hangs/{world}"
        self._seen = 0

    def close(self) -> None:
        """Release the connection."""
        if self._sentinel is not None:
            self._sentinel.close()
        self._store = None

    @property
    def shared(self) -> Any:
        """The connection, where it is one that no other code blocks; else None."""
        return None if self._sentinel is None else self._store

    def _alive(self) -> bool:
        """False once the store's process has closed its end."""
        if self._sentinel is None:
            return True
        look = select.poll()  # not `select`, which knows no descriptor beyond 1023
        look.register(self._sentinel, select.POLLIN | select.POLLHUP)
        return not look.poll(0)

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """torch's store; StoreGone instead of its errors."""
        if not self._alive():
            raise StoreGone("its process has ended")
        try:
            yield self._store
        except RuntimeError as error:
            raise StoreGone(str(error).splitlines()[0]) from error

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        with self.use() as store:
            store.set(f"{self._root}/{key}", value)

    def find(self, key: str) -> bytes | None:
        """A key's value, None if there is none."""
        with self.use() as store:
            full = f"{self._root}/{key}"
            return store.get(full) if store.check([full]) else None

    def add(self, key: str) -> int:
        """Count one more under a key."""
        with self.use() as store:
            return int(store.add(f"{self._root}/{key}", 1))

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
        """Write this rank's report, in place of its last one."""
        self.set(f"report/{report.rank}", as_text(report))

    def reports(self, ranks: Iterable[int]) -> dict[int, RankReport]:
        """The newest reports of these ranks, as far as there are any."""
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
