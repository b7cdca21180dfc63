"""Answers for a rank that has not come to a meeting: is it alive, and has it gone on with something else.

[Note: busy or gone] A rank may come late for good reasons, such as rank 0 writing a model for export before all ranks
save. It will come, and is waited for. A rank that did not call what the others called goes on: it takes part in
collectives that wait for the others, who wait for it. So where ranks have waited for a while, those that are missing
are asked, and a thread of each answers with the number of collectives it has begun in each process group. One that is
ahead of the rank that waits has gone on; one that does not answer has ended.
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any, Protocol

import torch.distributed as dist

__all__ = ["Answering", "ask", "is_ahead", "positions"]


class _Store(Protocol):
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def positions() -> dict[str, int]:
    """How many collectives this rank has begun, by process group."""
    found: dict[str, int] = {}
    groups: Any = dist.distributed_c10d._world.pg_names  # torch has no public list of them
    for group, name in tuple(groups.items()):
        try:
            found[name] = group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
    return found


def is_ahead(theirs: dict[str, int], ours: dict[str, int]) -> bool:
    """Whether another rank has begun a collective that this one has not."""
    return any(theirs.get(name, 0) > count for name, count in ours.items())


def ask(store: _Store, root: str, number: int) -> None:
    """Let the ranks that are missing from a meeting answer."""
    store.set(f"{root}/asked", str(number))


class Answering:
    """A thread that looks once in a while whether this rank is being waited for."""

    def __init__(self, store: _Store, root: str, rank: int, every: float) -> None:
        self.joined = -1
        """The last meeting that this rank came to."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_answer, args=(weakref.ref(self), self._stop, store, root, rank, every), daemon=True
        )
        self._thread.name = "checkpoint-presence"
        self._thread.start()
        # Also at the end of the program: a thread in the middle of a call must not meet an interpreter that is gone.
        self._end = weakref.finalize(self, _end, self._stop, self._thread)

    def close(self) -> None:
        """End the thread."""
        self._end()


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=5)


def _answer(owner: weakref.ref[Any], stop: threading.Event, store: _Store, root: str, rank: int, every: float) -> None:
    count = 0
    while not stop.wait(every):
        try:
            if not store.check([f"{root}/asked"]):
                continue
            number = int(store.get(f"{root}/asked"))
            alive = owner()
            if alive is None or alive.joined >= number:
                continue
            del alive
            count += 1
            told = json.dumps({"beat": count, "positions": positions()})
            store.set(f"{root}/{number}/busy/{rank}", told)
        except RuntimeError:  # the store is gone, and with it everybody who could ask
            return
