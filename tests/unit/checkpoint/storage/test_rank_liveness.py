"""A rank that is asked tells how far it is, as long as it lives, and nobody does anything in between."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading

import pytest
import torch.distributed as dist

from deepspeed.checkpoint.storage import rank_meeting
from deepspeed.checkpoint.storage.rank_meeting import Answer, Answering, ask, is_ahead

PATIENCE = 60.0  # an answer comes at once, and a machine under load may take its time


class Store(dict):
    """What was asked of it, and when a rank has told its place."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.told = threading.Event()

    def set(self, key, value):
        self.calls.append(("set", key))
        self[key] = value.encode()
        self.told.set()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def answering(store):
    made = Answering(store, "root", 2)
    assert store.told.wait(PATIENCE)
    yield made
    made.close()


def test_it_answers_until_it_is_closed(store, answering):
    assert ask(store, "root", [0, 2], PATIENCE) == {2: Answer(-1, {})}
    answering.left = 4
    assert ask(store, "root", [2], PATIENCE) == {2: Answer(4, {})}
    answering.close()
    assert not answering._thread.is_alive()
    assert ask(store, "root", [0, 2], PATIENCE) == {}
    answering.close()


def test_all_that_the_store_sees_is_where_to_ask(store, answering):
    for _ in range(3):
        ask(store, "root", [2], PATIENCE)
    answering.close()
    assert store.calls == [("set", "root/at/2")]


def test_many_are_asked_at_once(store):
    made = [Answering(store, "root", rank) for rank in range(50)]
    while len(store) < 50:
        assert store.told.wait(PATIENCE)
        store.told.clear()
    assert sorted(ask(store, "root", range(60), PATIENCE)) == list(range(50))
    for each in made:
        each.close()


def test_who_hangs_up_does_no_harm(store, answering):
    address, port = json.loads(store["root/at/2"])
    for _ in range(3):
        socket.create_connection(("127.0.0.1", port)).close()
    assert ask(store, "root", [2], PATIENCE) == {2: Answer(-1, {})}
    assert address == socket.gethostname()


def test_the_thread_ends_with_its_owner(store):
    made = Answering(store, "root", 2)
    thread = made._thread
    assert store.told.wait(PATIENCE)
    del made
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_forked_child_does_not_end_it(store, answering):
    pid = os.fork()
    if pid == 0:
        answering.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert ask(store, "root", [2], PATIENCE) == {2: Answer(-1, {})}


def test_a_store_that_is_gone_ends_it():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("connection reset")

    made = Answering(Gone(), "root", 2)
    made._thread.join(PATIENCE)
    assert not made._thread.is_alive()
    made.close()


@pytest.mark.parametrize("text", [b'{"left": 1', b'{"other": 1}', b"SSH-2.0"])
def test_what_is_no_answer_counts_as_none(store, text):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set("root/at/0", f'["{socket.gethostname()}", {listener.getsockname()[1]}]')

        def speak():
            asking, _ = listener.accept()
            with asking:
                asking.sendall(text)

        thread = threading.Thread(target=speak)
        thread.start()
        assert ask(store, "root", [0], PATIENCE) == {}
        thread.join()


def test_on_the_host_of_the_store_its_name_is_told():
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert rank_meeting._address(dist.PrefixStore("a", dist.PrefixStore("b", server))) == "localhost"


def test_who_is_ahead():
    assert is_ahead({"0": 5, "3": 9}, {"0": 4})
    assert is_ahead({"0": 4, "1": 8}, {"0": 4, "1": 7})
    assert not is_ahead({"0": 4, "3": 9}, {"0": 4, "1": 2})
    assert not is_ahead({}, {"0": 4})
