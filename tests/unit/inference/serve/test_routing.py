"""Which replica gets a prompt: the one with its prefix, unless it has much more to do."""

from __future__ import annotations

from types import SimpleNamespace

from deepspeed.inference.server import service
from deepspeed.inference.server.service import Router


def prompt(*chunks):
    return [token for chunk in chunks for token in [chunk] * 64]


def test_prompts_follow_their_longest_prefix_until_a_replica_is_overloaded(monkeypatch):
    replicas = [SimpleNamespace(load=0) for _ in range(3)]
    router = Router(replicas)
    assert router.choose(prompt(1, 2, 3)) == 0
    replicas[0].load = 1
    assert router.choose(prompt(4)) == 1
    assert router.choose(prompt(1, 2, 9)) == 0  # two chunks are there
    assert router.choose([1] * 63) == 1  # less than a chunk: the first of the idlest
    replicas[0].load, replicas[1].load, replicas[2].load = 6, 3, 1
    assert router.choose(prompt(1, 2, 3)) == 0  # twice as much and four more
    replicas[0].load = 7
    assert router.choose(prompt(1, 2, 3)) == 2
    replicas[0].load = 0
    assert router.choose(prompt(1, 2, 3)) == 2  # where it was computed last
    monkeypatch.setattr(service, "_REMEMBERED", 1)
    assert router.choose(prompt(5)) == 0
    replicas[0].load = 3
    replicas[2].load = 2
    replicas[1].load = 1
    assert router.choose(prompt(1, 2, 3)) == 1  # forgotten


def test_one_replica_gets_everything():
    assert Router([SimpleNamespace(load=100)]).choose(prompt(1)) == 0
