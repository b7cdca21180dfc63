"""Ranks that agree on a part of a store in which an earlier attempt has left its words."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as td
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.init import agreed_store, kept_by_agent

PATIENCE = timedelta(seconds=60)


def attempt(store, world, order):
    """Let the ranks come in that order, and write to the store that they agree upon; what each finds there."""

    def rank(number):
        own = agreed_store(store, rank=number, world=world, timeout=PATIENCE)
        own.set(f"rank{number}", str(number))
        return [own.get(f"rank{other}") for other in range(world)], own.add("count", 1)

    with ThreadPoolExecutor(world) as pool:
        return [each.result() for each in [pool.submit(rank, number) for number in order]]


@given(st.integers(2, 5).flatmap(lambda world: st.lists(st.permutations(range(world)), min_size=1, max_size=4)))
def test_every_attempt_begins_with_an_empty_store(orders):
    store = td.HashStore()
    store.set("rank0", "of the dead")
    for order in orders:
        world = len(order)
        found = attempt(store, world, order)
        assert sorted(count for _, count in found) == list(range(1, world + 1))
        assert all(values == [str(number).encode() for number in range(world)] for values, _ in found)


def test_words_of_the_dead_are_answered_and_do_not_count():
    """Rank 0 comes while only the words of an earlier attempt are there; the new ranks come later."""
    store = td.HashStore()
    for rank in (1, 2):
        store.set(f"word/{rank}", f"dead{rank}")
    names = {}

    def rank(number):
        names[number] = agreed_store(store, rank=number, world=3, timeout=PATIENCE)

    first = threading.Thread(target=rank, args=(0,))
    first.start()
    store.wait(["answer/dead1", "answer/dead2"])
    assert first.is_alive()
    others = [threading.Thread(target=rank, args=(number,)) for number in (1, 2)]
    for other in others:
        other.start()
    for thread in (first, *others):
        thread.join(60)
    names[0].set("key", "value")
    assert names[1].get("key") == names[2].get("key") == b"value"


def test_a_rank_that_never_comes_is_an_error():
    with pytest.raises(td.DistStoreError, match="0 of 1 ranks confirmed"):
        agreed_store(td.HashStore(), rank=0, world=2, timeout=timedelta(seconds=0.1))


def test_where_an_agent_keeps_the_store():
    assert kept_by_agent({"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not kept_by_agent({"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not kept_by_agent({})
