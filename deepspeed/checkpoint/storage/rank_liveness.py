"""Answers for a rank that has not come to a meeting: is it alive, and has it gone on with something else.

[Note: busy or gone] A rank may come late for good reasons, such as rank 0 writing a model for export before all ranks
save. It will come, and is waited for. A rank that did not call what the others called goes on: it takes part in
collectives that wait for the others, who wait for it. So where ranks have waited for a while, they ask those that are
missing: a thread of each tells how many collectives it has begun in each process group. One that is ahead of the rank
that waits has gone on; one that does not answer has ended.

Each rank listens at a port of its own, whose place it leaves in the job's store, and between saves nobody does more
than that. A thread that waited in the store would need a connection of its own, fills the log with torch's traces when
the store ends before it, and polls where the store is a file.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore

from deepspeed.comm.watch.look import positions
from deepspeed.log import logger

__all__ = ["Answer", "Answering", "ask", "is_ahead", "positions"]

_LOOPBACK = "127.0.0.1"
_SLOW = 5.0  # seconds that somebody who asks may take to read
_PAUSE = 0.1
_AT_ONCE = 32  # ranks that are asked at the same time


class _Store(Protocol):
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank tells about itself."""

    left: int
    """The last meeting that it has left."""
    positions: dict[str, int]


def is_ahead(theirs: dict[str, int], ours: dict[str, int]) -> bool:
    """Whether another rank has begun a collective that this one has not."""
    return any(theirs.get(name, 0) > count for name, count in ours.items())


def ask(store: _Store, root: str, ranks: Sequence[int], patience: float) -> dict[int, Answer]:
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

    def __init__(self, store: _Store, root: str, rank: int) -> None:
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


def _answer(owner: weakref.ref[Answering], bell: socket.socket, store: _Store, key: str) -> None:
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
