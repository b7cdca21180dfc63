"""Ranks as threads that meet in a store: each gets all values; failures and absence are errors on all."""

import contextlib
import itertools
import json
import logging
import math
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from deepspeed.checkpoint.storage import rank_meeting
from deepspeed.checkpoint.storage.rank_meeting import (
    SingleRank,
    StoreExchange,
    default_exchange,
    is_ahead,
    on_all_ranks,
)
from deepspeed.errors import CheckpointError
from deepspeed.log import logger

SHORT = 1.0  # seconds until a rank is given up; one that lives shows it eight times as often


@contextlib.contextmanager
def answers(*exchanges):
    """Answer for these ranks, as the threads of their hang watches do."""
    done = threading.Event()

    def loop():
        while not done.wait(0.02):
            for exchange in exchanges:
                exchange.answer(exchange.store)

    thread = threading.Thread(target=loop)
    thread.start()
    yield
    done.set()
    thread.join()


class Ranks:
    """Runs a function on several ranks, each a thread."""

    def __init__(self, world, wait=60.0, **options):
        self.store = dist.HashStore()
        self.exchanges = [StoreExchange(self.store, rank, world, wait=wait, **options) for rank in range(world)]

    def run(self, act, ranks=None):
        results = {}

        def one(rank):
            try:
                results[rank] = act(rank, self.exchanges[rank])
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(r,)) for r in ranks or range(len(self.exchanges))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        return [results[rank] for rank in sorted(results)]


def talk(rank, exchange):
    with exchange.meeting("saving") as meeting:
        first = meeting.gather({"rank": rank})
        return first, meeting.gather(f"text {rank}")


def test_everybody_hears_everybody():
    ranks = Ranks(4)
    for _ in range(3):
        heard = ranks.run(talk)
        assert heard == [([{"rank": r} for r in range(4)], [f"text {r}" for r in range(4)])] * 4


def test_keys_are_removed():
    ranks = Ranks(3)
    ranks.run(talk)
    after_one = ranks.store.num_keys()
    for _ in range(5):
        ranks.run(talk)
    assert ranks.store.num_keys() == after_one
    assert after_one <= 3 + 2  # the counters, and what the last step said


def test_two_exchanges_do_not_mix():
    store = dist.HashStore()
    pairs = [[StoreExchange(store, rank, 2, wait=60.0) for _ in range(2)] for rank in range(2)]
    heard = {}

    def run(rank, which):
        with pairs[rank][which].meeting("saving") as meeting:
            heard[rank, which] = meeting.gather((rank, which))

    threads = [threading.Thread(target=run, args=(rank, which)) for rank in range(2) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for which in range(2):
        assert heard[0, which] == heard[1, which] == [[0, which], [1, which]]


@pytest.mark.parametrize(
    ("present", "absent"), [([1], "ranks 0, 2 of 3"), ([0], "ranks 1, 2 of 3"), ([0, 2], "rank 1 of 3")]
)
def test_absent_ranks_are_named_and_the_next_meeting_works(present, absent):
    ranks = Ranks(3, wait=SHORT)
    for result in ranks.run(talk, present):
        assert isinstance(result, CheckpointError)
        assert f"saving: {absent} did not take part within 1 s. Every rank has to call it" in str(result)
    late = [rank for rank in range(3) if rank not in present]
    assert all(isinstance(result, CheckpointError) for result in ranks.run(talk, late))
    for exchange in ranks.exchanges:
        exchange.wait = 60.0
    assert ranks.run(talk)[0] == ranks.run(talk)[2]


def test_slow_work_is_no_absence():
    ranks = Ranks(2, wait=SHORT)

    def slow(rank, exchange):
        with exchange.meeting("saving") as meeting:
            meeting.gather(None)
            if rank == 1:
                threading.Event().wait(2 * SHORT)
            return meeting.gather(rank)

    assert ranks.run(slow) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_is_noticed(leaver):
    ranks = Ranks(3, wait=SHORT)

    def leave(rank, exchange):
        with exchange.meeting("saving") as meeting:
            meeting.gather(None)
            if rank == leaver:
                raise KeyboardInterrupt
            return meeting.gather(rank)

    results = ranks.run(leave)
    assert isinstance(results.pop(leaver), KeyboardInterrupt)
    for result in results:
        assert isinstance(result, CheckpointError)
        assert f"no sign of life from rank {leaver} of 3 for 1 s" in str(result)


class Heard(logging.Handler):
    """Set once somebody has said for whom they wait, which they do when it takes longer than `wait`."""

    def __init__(self):
        super().__init__()
        self.waiting = threading.Event()

    def emit(self, record):
        if "waiting for ranks" in record.getMessage():
            self.waiting.set()


@pytest.fixture
def heard():
    handler = Heard()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_busy_is_waited_for(heard, late):
    ranks = Ranks(2, wait=SHORT, late=True)

    def act(rank, exchange):
        if rank == late:
            assert heard.waiting.wait(60)
        return talk(rank, exchange)

    with answers(*ranks.exchanges):
        told = ranks.run(act)
    assert told[0] == told[1] == ([{"rank": 0}, {"rank": 1}], ["text 0", "text 1"])


def test_a_rank_that_has_left_is_not_waited_for(monkeypatch):
    """It still answers, but will not come again."""
    monkeypatch.setattr(rank_meeting, "PATIENCE", math.inf)
    ranks = Ranks(2, wait=SHORT, late=True)

    def act(rank, exchange):
        with exchange.meeting("saving") as meeting:
            if rank == 1:
                raise KeyboardInterrupt
            return meeting.gather(rank)

    with answers(*ranks.exchanges):
        told, interrupted = ranks.run(act)
    assert "saving: rank 1 of 2 did not take part within 1 s" in str(told)
    assert isinstance(interrupted, KeyboardInterrupt)


@pytest.mark.parametrize("end", ["closed", "ahead", "silent"])
def test_a_rank_that_will_not_come_is_not_waited_for(monkeypatch, end):
    monkeypatch.setattr(rank_meeting, "PATIENCE", math.inf)
    ranks = Ranks(2, wait=SHORT, late=True)
    if end == "closed":
        ranks.exchanges[1].close()
    if end == "ahead":  # the second call is that of the rank that is asked
        counts = itertools.chain([{"0": 4}], itertools.repeat({"0": 5}))
        monkeypatch.setattr(rank_meeting, "positions", lambda: next(counts))
    with answers(*(ranks.exchanges if end != "silent" else ())):
        (told,) = ranks.run(talk, [0])
    assert "saving: rank 1 of 2 did not take part within 1 s" in str(told)


def test_a_rank_answers_each_question_once():
    ranks = Ranks(2, late=True)
    store, exchange = ranks.store, ranks.exchanges[1]
    before = store.num_keys()
    exchange.answer(store)
    assert store.num_keys() == before
    store.add(f"{exchange.root}/asked/1", 1)
    for _ in range(2):
        exchange.answer(store)
        assert json.loads(store.get(f"{exchange.root}/answer/1")) == [1, -1, {}]
        store.set(f"{exchange.root}/answer/1", "[1, -1, {}]")
    with answers(ranks.exchanges[0]):
        ranks.run(talk)
    store.add(f"{exchange.root}/asked/1", 1)
    exchange.answer(store)
    assert json.loads(store.get(f"{exchange.root}/answer/1")) == [2, 0, {}]


def test_which_rank_is_ahead():
    assert is_ahead({"0": 5, "3": 9}, {"0": 4})
    assert is_ahead({"0": 4, "1": 8}, {"0": 4, "1": 7})
    assert not is_ahead({"0": 4, "3": 9}, {"0": 4, "1": 2})
    assert not is_ahead({}, {"0": 4})


def test_a_rank_that_leaves_while_another_looks_does_not_block():
    """Between the look whether its key exists and the read, the key goes."""

    class Store:
        def __init__(self):
            self.inner = dist.HashStore()
            self.inner.set_timeout(timedelta(seconds=100))

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def check(self, keys):
            found = self.inner.check(keys)
            for key in keys:
                if "/alive/1" in key:
                    self.inner.delete_key(key)
            return found

    store = Store()
    exchanges = [StoreExchange(store, rank, 2, wait=SHORT) for rank in range(2)]
    store.set(f"{exchanges[0].root}/0/alive/1", "1")
    with pytest.raises(CheckpointError, match="rank 1 of 2 did not take part"):
        talk(0, exchanges[0])


def test_a_connection_is_made_at_the_first_meeting():
    store, made = dist.HashStore(), []

    def connect():
        made.append(store)
        return store

    exchange = StoreExchange(store, 0, 1, connect=connect)
    assert made == []
    for _ in range(2):
        talk(0, exchange)
    assert len(made) == 1


def test_a_failure_reaches_all():
    ranks = Ranks(3)

    def act(rank, exchange):
        def work():
            if rank == 1:
                raise CheckpointError("/data/x.pt: No space left on device")
            return rank

        with exchange.meeting("saving") as meeting:
            return on_all_ranks(meeting, "saving checkpoint 'a'", work)

    for result in ranks.run(act):
        assert isinstance(result, CheckpointError)
        assert str(result) == "saving checkpoint 'a' failed. rank 1: /data/x.pt: No space left on device"


def test_a_mistake_keeps_its_type_where_it_was_made():
    ranks = Ranks(2)

    def act(rank, exchange):
        with exchange.meeting("saving") as meeting:
            return on_all_ranks(meeting, "saving", lambda: {}["gone"] if rank == 0 else None)

    mine, other = ranks.run(act)
    assert isinstance(mine, KeyError)
    assert "rank 0: KeyError: 'gone'" in str(other)


def test_results_of_all():
    def act(rank, exchange):
        with exchange.meeting("saving") as meeting:
            return on_all_ranks(meeting, "saving", lambda: rank * 10)

    assert Ranks(2).run(act) == [(0, [0, 10]), (10, [0, 10])]


def test_alone():
    assert isinstance(default_exchange(), SingleRank)
    with SingleRank().meeting("saving") as meeting:
        assert meeting.gather((1, "a")) == [[1, "a"]]
        with pytest.raises(CheckpointError, match=r"saving failed\. rank 0: full"):
            on_all_ranks(meeting, "saving", fail)


def fail():
    raise OSError("full")
