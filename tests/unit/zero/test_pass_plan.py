"""Plans of gathers: pure arithmetic over what a pass uses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.zero.parameters.fetch_plan import FetchLimits, UseEvent, plan


@st.composite
def passes(draw):
    """Properly nested uses of a few parameters, and the parameters' sizes."""
    count = draw(st.integers(1, 6))
    numel = {shard: draw(st.integers(1, 20)) for shard in range(count)}
    uses = [tuple(sorted(draw(st.sets(st.integers(0, count - 1), max_size=3)))) for _ in range(draw(st.integers(1, 5)))]
    blocks = [draw(st.integers(-1, 2)) for _ in uses]
    events: list[UseEvent] = []
    open_: list[int] = []
    for _ in range(draw(st.integers(1, 14))):
        if open_ and draw(st.booleans()):
            use = open_.pop()
            events.append(UseEvent(False, use, uses[use], blocks[use]))
        else:
            use = draw(st.integers(0, len(uses) - 1))
            open_.append(use)
            events.append(UseEvent(True, use, uses[use], blocks[use]))
    while open_:
        use = open_.pop()
        events.append(UseEvent(False, use, uses[use], blocks[use]))
    return events, numel


def follow(events, made, numel, whole=frozenset()):
    """Do what the plan says; returns the peak, checks that everything is whole when it is used."""
    present, holds, step, opened = set(whole), {}, 0, {}
    peak = 0
    for event in events:
        if event.enter:
            doing = made.steps[step]
            assert doing.use == event.use
            assert not any(holds.get(shard) for shard in doing.drop), "nothing that is in use is dropped"
            present -= set(doing.drop)
            start = [shard for batch in doing.start for shard in batch]
            assert not present & set(start), "nothing is gathered twice"
            assert len(set(start)) == len(start)
            present |= set(start)
            peak = max(peak, sum(numel[shard] for shard in present))
            assert set(event.shards) <= present
            opened.setdefault(event.use, []).append(step)
            for shard in event.shards:
                holds[shard] = holds.get(shard, 0) + 1
            step += 1
        else:
            keep = made.steps[opened[event.use].pop()].keep
            for shard in event.shards:
                holds[shard] -= 1
                if not holds[shard] and shard not in keep:
                    present.discard(shard)
    assert step == len(made.steps)
    return peak, present


def held_at_most(events, numel):
    """The least that must be whole at one time."""
    holds, most = {}, 0
    for event in events:
        for shard in event.shards:
            holds[shard] = holds.get(shard, 0) + (1 if event.enter else -1)
        most = max(most, sum(numel[shard] for shard, count in holds.items() if count))
    return most


@settings(max_examples=300, deadline=None)
@given(passes(), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_a_plan_has_everything_in_time_and_within_its_limits(traced, ahead, live, reuse, returns):
    events, numel = traced
    made = plan(events, numel, FetchLimits(ahead, live, reuse), returns=returns)
    peak, left = follow(events, made, numel)
    # ahead of its block, and the rest of a block that is small enough to be gathered ahead
    assert peak <= max(live, held_at_most(events, numel) + 2 * ahead)
    assert peak <= made.peak
    assert left == made.kept if returns else not left


@settings(max_examples=100, deadline=None)
@given(passes(), st.integers(0, 60))
def test_without_room_nothing_is_ahead_or_kept(traced, reuse):
    events, numel = traced
    made = plan(events, numel, FetchLimits(10**6, 0, reuse))
    for step, event in zip(made.steps, [event for event in events if event.enter], strict=True):
        assert {shard for batch in step.start for shard in batch} <= set(event.shards)


def line(count):
    return [UseEvent(enter, use, (use,)) for use in range(count) for enter in (True, False)]


@pytest.mark.parametrize(("ahead", "batches"), [(0, 8), (10, 8), (20, 5), (1000, 2)])
def test_gathers_ahead_are_made_in_batches(ahead, batches):
    made = plan(line(8), dict.fromkeys(range(8), 10), FetchLimits(ahead, 10**6, 0))
    assert sum(bool(step.start) for step in made.steps) <= batches


def test_a_parameter_that_returns_soon_is_kept():
    events = [*line(2), *line(2)]
    sizes = {0: 5, 1: 7}
    assert plan(events, sizes, FetchLimits(0, 100, 6)).steps[1].keep == {1}
    assert plan(events, sizes, FetchLimits(0, 100, 7)).steps[0].keep == {0}
    assert plan(events, sizes, FetchLimits(0, 100, 0)).steps[0].keep == frozenset()


def test_what_backward_needs_is_kept_for_it():
    sizes = dict.fromkeys(range(4), 10)
    made = plan(line(4), sizes, FetchLimits(0, 1000, 20), returns=True)
    assert made.kept == {2, 3}, "between its uses, 1 would wait for 2, 3, 3 and 2"
    after = [UseEvent(e.enter, e.use, e.shards) for e in line(4)][::-1]
    after = [UseEvent(not e.enter, e.use, e.shards) for e in after]
    follow(after, plan(after, sizes, FetchLimits(0, 1000, 20), whole=made.kept), sizes, whole=made.kept)


def layers(count, per_layer):
    """Blocks of `per_layer` modules with a parameter each."""
    return [
        UseEvent(enter, use, (use,), use // per_layer) for use in range(count * per_layer) for enter in (True, False)
    ]


def test_a_block_is_gathered_by_one_operation_while_the_one_before_it_runs():
    made = plan(layers(5, 7), dict.fromkeys(range(35), 10), FetchLimits(70, 10**6, 0))
    batches = [batch for step in made.steps for batch in step.start]
    assert batches == [tuple(range(7 * block, 7 * block + 7)) for block in range(5)]
    assert [place for place, step in enumerate(made.steps) if step.start] == [0, 7, 14, 21], "when a block begins"
    assert made.peak == 140, "the block that runs and the next one"


def test_blocks_that_are_larger_than_what_may_be_ahead_are_gathered_in_parts():
    made = plan(layers(3, 4), dict.fromkeys(range(12), 10), FetchLimits(20, 10**6, 0))
    assert max(len(batch) for step in made.steps for batch in step.start) <= 2
    assert made.peak <= 40


class Counted(dict):
    """Sizes that count how often they are asked for."""

    asked = 0

    def __getitem__(self, key):
        Counted.asked += 1
        return super().__getitem__(key)


@pytest.mark.parametrize(
    "limits", [FetchLimits(50, 10**9, 10**9), FetchLimits(10**9, 200, 10**9), FetchLimits(70, 300, 0)]
)
def test_planning_takes_time_linear_in_the_trace(limits):
    def asked(count):
        Counted.asked = 0
        forth = layers(count, 7)
        plan([*forth, *forth], Counted(dict.fromkeys(range(count * 7), 10)), limits, returns=True)
        return Counted.asked

    assert asked(800) < 9 * asked(100)
