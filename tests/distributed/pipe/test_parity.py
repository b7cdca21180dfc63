"""A pipeline trains as one process does, whatever the schedule, the stages, the micro-batches and the ZeRO stage."""

from __future__ import annotations

import pytest

from tests.harness import ranks, shared_ranks
from tests.pipelines import assert_equal, train_pipeline, train_whole

# (schedule, stages, micro-batches, ZeRO stage): each value with many of the others
TWO = [
    ("1f1b", 2, 1, 0),
    ("gpipe", 2, 3, 0),
    ("zb-h1", 2, 5, 0),
    ("zbv", 2, 2, 0),
    ("interleaved", 2, 4, 0),
    ("dualpipev", 2, 6, 0),
]
THREE = [("1f1b", 3, 7, 0), ("zb-h1", 3, 4, 0), ("interleaved", 3, 2, 0), ("zbv", 3, 5, 0), ("dualpipev", 3, 6, 0)]
FOUR = [
    ("1f1b", 2, 3, 3),
    ("zb-h1", 2, 2, 2),
    ("interleaved", 2, 3, 1),
    ("zbv", 2, 3, 3),
    ("dualpipev", 2, 4, 1),
    ("gpipe", 2, 2, 2),
    ("1f1b", 4, 6, 0),
    ("dualpipev", 4, 8, 0),
]


def check(cases, world):
    for schedule, stages, count, zero in cases:
        replicas = world // stages
        expected, end = train_whole(2, replicas, count)
        losses, engine = train_pipeline(stages, count, 2, zero, schedule=schedule)
        assert losses == pytest.approx(expected, abs=1e-6), (schedule, stages, count, zero)
        assert_equal(engine, end)
        engine.destroy()


@shared_ranks(2)
def test_two_ranks():
    check(TWO, 2)


@ranks(3)
def test_three_ranks():
    check(THREE, 3)


@shared_ranks(4)
def test_four_ranks():
    check(FOUR, 4)
