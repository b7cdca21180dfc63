"""A stage that dies or never comes: every other rank says which one, by stage and rank."""

from __future__ import annotations

import os
import re
import signal

import deepspeed
from tests.hanging import linger, play
from tests.harness import ranks
from tests.pipelines import config, data, pipeline


def _trained():
    engine, *_ = deepspeed.initialize(model=pipeline(3), config=config(3))
    engine.train_batch(data(0, 3))
    return engine


def die(rank):
    engine = _trained()
    if rank == 1:
        engine.module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    engine.train_batch(data(0, 3))


@ranks(1, init=False)
def test_a_stage_that_dies():
    said = play(die)
    assert said[1].status == -signal.SIGKILL
    for rank in (0, 2):
        assert said[rank].error.startswith("rank 1 is dead: its process")
        assert "stage 1 on rank 1" in said[rank].error.splitlines()[0]


def stay_away(rank):
    engine = _trained()
    if rank == 1:
        linger()
    engine.train_batch(data(0, 3))


@ranks(1, init=False)
def test_a_stage_that_never_comes():
    said = play(stay_away, forever=[1])
    for rank in (0, 2):
        assert re.match(r"rank 1 never entered gather_words \d+ of `begin of train_batch\(\)`", said[rank].error)
        assert "stage 1 on rank 1" in said[rank].error.splitlines()[0]
