"""A rank that is asked answers until it has come, and says how far it is."""

from __future__ import annotations

import json
import threading

from deepspeed.checkpoint.presence import Answering, ask, is_ahead


class Store(dict):
    """What a thread has written, and when."""

    def __init__(self):
        super().__init__()
        self.wrote = threading.Semaphore(0)

    def set(self, key, value):
        self[key] = value.encode()
        if "busy" in key:
            self.wrote.release()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


def test_it_answers_until_it_has_come():
    store = Store()
    answering = Answering(store, "root", 2, 0.005)
    assert not store.wrote.acquire(timeout=0.05)
    ask(store, "root", 4)
    for _ in range(3):
        assert store.wrote.acquire(timeout=10)
    assert json.loads(store["root/4/busy/2"])["beat"] >= 3
    answering.joined = 4
    while store.wrote.acquire(timeout=0.05):
        pass
    assert answering._thread.is_alive()
    answering.close()
    assert not answering._thread.is_alive()
    answering.close()


def test_who_is_ahead():
    assert is_ahead({"0": 5, "3": 9}, {"0": 4})
    assert is_ahead({"0": 4, "1": 8}, {"0": 4, "1": 7})
    assert not is_ahead({"0": 4, "3": 9}, {"0": 4, "1": 2})
    assert not is_ahead({}, {"0": 4})
