"""Axes, neighbours in a ring, and who is slow on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.preflight.check import Level
from deepspeed.preflight.checks.speed import BandwidthCheck, BandwidthFact, axes_of, ring_rounds
from tests.unit.preflight.jobs import good, job, only


@given(st.integers(2, 400))
def test_every_neighbour_once_and_one_partner_at_a_time(world):
    rounds = ring_rounds(world)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, pairs)) == sorted(
        map(sorted, {frozenset((rank, (rank + 1) % world)) for rank in range(world)})
    )
    for round_ in rounds:
        ranks = [rank for pair in round_ for rank in pair]
        assert len(ranks) == len(set(ranks))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=60))
def test_axes_of_uneven_hosts(counts):
    hosts = [f"h{number}" for number, count in enumerate(counts) for _ in range(count)]
    axes = axes_of(hosts)
    world = len(hosts)
    assert axes["world"] == [tuple(range(world))]
    for groups in axes.values():
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks))
        assert all(len(group) > 1 for group in groups) or world == 1
    for group in axes.get("within a host", []):
        assert len({hosts[rank] for rank in group}) == 1
    for group in axes.get("between hosts", []):
        assert len({hosts[rank] for rank in group}) == len(group)


def test_axes_of_a_config():
    axes = axes_of(["a"] * 4 + ["b"] * 4, sp=2)
    assert axes["sp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert axes["dp"] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert set(axes_of(["a"] * 8, tp=3)) == {"world"}  # which does not divide the ranks: the config's check says so
    assert set(axes_of(["a"] * 8)) == {"world"}


def fact(rank, world=64, link=1e9, **changed):
    """A rank of a job whose links are equally fast."""
    links = {str((rank + step) % world): link for step in (-1, 1)}
    axes = {"world": (0, world, 5e8), "within a host": (rank // 8 * 8, 8, 8e9)}
    return replace(BandwidthFact(axes, links), **changed)


def test_equal_ranks():
    finding = only(BandwidthCheck().judge(job(fact, 64)))
    assert finding.level is Level.OK
    assert finding.what == "bus bandwidth of an all-reduce: world 0.5 GB/s, within a host 8 GB/s"


@pytest.mark.parametrize(("part", "level"), [(0.2, Level.WARNING), (0.01, Level.PROBLEM)])
def test_a_slow_rank_is_named_and_its_neighbours_are_not(part, level):
    odd = {
        20: fact(20, links={"19": part * 1e9, "21": part * 1e9}),
        19: fact(19, links={"18": 1e9, "20": part * 1e9}),
        21: fact(21, links={"22": 1e9, "20": part * 1e9}),
    }
    finding = only(BandwidthCheck().judge(job(fact, 64, odd)))
    assert (finding.level, finding.ranks) == (level, (20,))
    assert "rank 20 on host h2" in finding.what


def test_a_slow_host_is_named_by_its_axis():
    odd = {rank: fact(rank, axes={"world": (0, 64, 5e8), "within a host": (8, 8, 1e9)}) for rank in range(8, 16)}
    finding = only(BandwidthCheck().judge(job(fact, 64, odd)))
    assert finding.ranks == tuple(range(8, 16))
    assert "within a host" in finding.what


def test_one_rank():
    assert good(BandwidthCheck().judge(job(lambda rank: BandwidthFact(), 1)))
