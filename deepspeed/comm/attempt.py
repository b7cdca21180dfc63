"""A part of a store that only the ranks of this attempt use, where a store outlives the ranks.

[Note: attempts] torchrun keeps one store for all its restarts, at the same address. What ranks of an earlier attempt
wrote there, such as where they listened, is found by the next ones, who then wait for the dead. No variable that a rank
gets is new in each attempt and the same on all hosts. So the ranks agree on a name: each says a word that nobody has
said before, rank 0 answers every word with the name that it chose, and whoever has an answer confirms it. Words of the
dead are answered, too, but never confirmed; rank 0 looks again until as many have confirmed as there are.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["agreed_store", "kept_by_agent", "store_of_agent"]

_SHORTEST, _LONGEST = 0.01, 0.5  # seconds between two looks of rank 0
_AGAIN = timedelta(seconds=5)  # after which a rank says its word again: a dying one may have overwritten it


def kept_by_agent(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the store at MASTER_ADDR is one that torch's agent keeps over restarts."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_agent(address: str, port: int, *, rank: int, world: int, timeout: timedelta) -> Store:
    """The agent's store as if it were new."""
    store = TCPStore(address, port, world, is_master=False, timeout=timeout)
    return agreed_store(store, rank=rank, world=world, timeout=timeout)


def agreed_store(store: Store, *, rank: int, world: int, timeout: timedelta) -> Store:
    """The part of the store that these ranks agree upon; returns once all of them have."""
    until = time.monotonic() + timeout.total_seconds()
    name = _answer(store, world, until) if rank == 0 else _ask(store, rank, until)
    return PrefixStore(f"attempt/{name}", store)


def _answer(store: Store, world: int, until: float) -> str:
    name = secrets.token_hex(8)
    words = [f"word/{rank}" for rank in range(1, world)]
    answered: set[bytes] = set()
    pause = _SHORTEST
    while (confirmed := store.add(f"confirmed/{name}", 0)) < world - 1:
        if time.monotonic() > until:
            raise DistStoreError(f"{confirmed} of {world - 1} ranks confirmed that they are part of this attempt")
        if store.check(words):
            new = set(store.multi_get(words)) - answered
            for word in new:
                store.set(f"answer/{word.decode()}", name)
            answered |= new
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return name


def _ask(store: Store, rank: int, until: float) -> str:
    word = secrets.token_hex(8)
    while True:
        store.set(f"word/{rank}", word)
        try:
            store.wait([f"answer/{word}"], _AGAIN)
            break
        except DistStoreError:
            if time.monotonic() > until:
                raise
    name: str = store.get(f"answer/{word}").decode()
    store.add(f"confirmed/{name}", 1)
    return name
