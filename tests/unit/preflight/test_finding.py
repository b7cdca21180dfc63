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
    name_ranks,
    stragglers,
    unlike_most,
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


def unlike(values):
    """Usual value and the others with their ranks, of ranks that each have a value."""
    told = [RankFact(rank, "h", value) for rank, value in enumerate(values)]
    found = list(unlike_most(told, values))
    return {usual for _, usual, _ in found}, {value: [each.rank for each in some] for value, _, some in found}


@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1))
def test_the_usual_value_is_the_most_frequent_one(values):
    usual, others = unlike(values)
    counts = {value: values.count(value) for value in values}
    assert usual <= {value for value, count in counts.items() if count == max(counts.values())}
    assert len(usual) == (len(counts) > 1)
    assert (
        others
        == {value: [rank for rank, own in enumerate(values) if own == value] for value in values if value not in usual}
        or not usual
    )


def test_of_two_values_the_first_rank_has_the_usual_one():
    assert unlike(["a", "a", "b", "b"]) == ({"a"}, {"b": [2, 3]})
    assert unlike([]) == (set(), {})


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
