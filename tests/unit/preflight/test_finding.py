"""How ranks are named, and who is not like the rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.preflight.check import (
    MUCH_SLOWER,
    SLOWER,
    Level,
    RankFact,
    few,
    level_of,
    minority_values,
    name_ranks,
    stragglers,
)


@given(st.sets(st.integers(0, 5000), min_size=1))
def test_ranges_name_every_number_or_say_how_many(numbers):
    text = few(numbers)
    if "…" in text:
        assert f"({len(numbers)} in all)" in text
        return
    named = set()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


def test_who():
    told = [RankFact(rank, f"h{rank // 4}", None) for rank in range(40)]
    assert name_ranks(told[3:4]) == "rank 3 on host h0"
    assert name_ranks(told[2:6]) == "ranks 2-5 on hosts h0, h1"
    assert name_ranks(told) == "ranks 0-39 on 10 hosts"


@given(st.dictionaries(st.integers(0, 3000), st.sampled_from("abc"), min_size=1))
def test_the_usual_value_is_the_most_frequent_one(values):
    usual, others = minority_values(values)
    counts = {value: list(values.values()).count(value) for value in values.values()}
    assert counts[usual] == max(counts.values())
    assert sorted(rank for ranks in others.values() for rank in ranks) == sorted(
        rank for rank, value in values.items() if value != usual
    )


def test_of_two_values_the_lowest_rank_has_the_usual_one():
    assert minority_values({3: "b", 1: "a", 2: "b", 0: "a"}) == ("a", {"b": [2, 3]})


@given(st.lists(st.floats(0.8, 1.2), min_size=3, max_size=3000), st.data())
def test_one_slow_rank_among_many_is_named(speeds, data):
    rank = data.draw(st.integers(0, len(speeds) - 1))
    part = data.draw(st.floats(0.01, 0.3))
    found = stragglers({at: part if at == rank else speed for at, speed in enumerate(speeds)})
    assert list(found) == [rank]
    assert level_of(found) is (Level.PROBLEM if min(found.values()) < MUCH_SLOWER else Level.WARNING)


@given(st.lists(st.floats(0.8, 1.2), max_size=3000))
def test_equal_ranks_are_not_blamed(speeds):
    assert stragglers(dict(enumerate(speeds))) == {}
    assert level_of({}) is Level.OK
    assert SLOWER > MUCH_SLOWER


def test_of_two_the_slower_one_may_be_named():
    assert list(stragglers({0: 10.0, 1: 4.0})) == [1]
    assert stragglers({0: 10.0, 1: 6.0}) == {}
    assert stragglers({0: 0.0, 1: 0.0}) == {}
