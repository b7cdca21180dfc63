"""The schedule: what a step holds, who waits, who is preempted, and what is refused."""

from __future__ import annotations

import pytest

from deepspeed.errors import UsageError
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.scheduler import CacheGroup, RequestTooLarge, ScheduleLimits, Scheduler
from deepspeed.generate.sequence import Sequence, SequenceState


def schedule(blocks=100, host_blocks=0, window=None, **config):
    return Scheduler(ScheduleLimits(**{"block_size": 4, **config}), [CacheGroup((0,), blocks, window, host_blocks)])


def request(uid, length, *, priority=0, ends=(), first=None, **params):
    """The sequences of a request; the prompts of all have different first tokens."""
    made = SamplingParams(**params)
    prompt = [uid * 1000 if first is None else first, *range(1, length)]
    return [
        Sequence(uid + at, prompt, made, request=uid, index=at, priority=priority, end_ids=frozenset(ends))
        for at in range(made.n)
    ]


def add(scheduler, *args, **params):
    made = request(*args, **params)
    scheduler.add(made)
    return made if len(made) > 1 else made[0]


def cancel(scheduler, uid):
    return scheduler.finish(uid, "cancelled")


def shown(step):
    return [(work.sequence.uid, work.start, work.count, work.samples) for work in step.work]


def answer(scheduler, step, token=7):
    return scheduler.collect(step, {work.sequence.uid: [token] for work in step.work if work.samples})


def test_decode_first_then_chunks_of_prompts():
    scheduler = schedule(max_tokens_per_step=10)
    add(scheduler, 0, 4)
    step = scheduler.next()
    assert shown(step) == [(0, 0, 4, True)]
    answer(scheduler, step)
    add(scheduler, 1, 13)
    add(scheduler, 2, 5)
    add(scheduler, 3, 5)
    expected = [
        [(0, 4, 1, True), (1, 0, 9, False)],
        [(0, 5, 1, True), (1, 9, 4, True), (2, 0, 5, True)],
        [(0, 6, 1, True), (1, 13, 1, True), (2, 5, 1, True), (3, 0, 5, True)],
    ]
    for work in expected:
        step = scheduler.next()
        assert shown(step) == work
        answer(scheduler, step)


def test_the_last_token_of_a_prompt_is_a_chunk():
    scheduler = schedule(max_tokens_per_step=4)
    add(scheduler, 0, 5)
    steps = [scheduler.next(), scheduler.next(), scheduler.next()]
    assert [shown(step) for step in steps] == [[(0, 0, 4, False)], [(0, 4, 1, True)], [(0, 5, 1, True)]]


def test_steps_before_the_tokens_are_known():
    scheduler = schedule()
    one = add(scheduler, 0, 3, max_tokens=3)
    first, second, third = scheduler.next(), scheduler.next(), scheduler.next()
    assert [shown(step) for step in (first, second, third)] == [
        [(0, 0, 3, True)], [(0, 3, 1, True)], [(0, 4, 1, True)],
    ]  # fmt: skip
    assert scheduler.next() is None  # what is in flight ends it
    assert [each.tokens for step in (first, second) for each in answer(scheduler, step)] == [[7], [7]]
    assert not one.finished
    answer(scheduler, third)
    assert (one.generated, one.finish_reason) == ([7, 7, 7], "length")
    assert scheduler.stats.free_blocks == 100


def test_the_token_after_the_end_is_dropped():
    scheduler = schedule()
    one = add(scheduler, 0, 3, ends=[9])
    first, second = scheduler.next(), scheduler.next()
    assert [(each.sequence, each.tokens) for each in answer(scheduler, first, 9)] == [(one, [9])]
    assert (one.finish_reason, scheduler.stats.free_blocks) == ("stop", 100)
    assert answer(scheduler, second) == []
    assert one.generated == [9]
    assert scheduler.next() is None


def test_min_tokens():
    scheduler = schedule()
    one = add(scheduler, 0, 3, ends=[9], min_tokens=2)
    for _ in range(3):
        assert not one.finished
        answer(scheduler, scheduler.next(), 9)
    assert (one.generated, one.finish_reason) == ([9, 9, 9], "stop")


def test_the_context_ends_a_sequence():
    scheduler = schedule(max_context=8)
    one = add(scheduler, 0, 5, max_tokens=100)
    while step := scheduler.next():
        answer(scheduler, step)
    assert (len(one.tokens), one.finish_reason) == (8, "length")


def test_priority_then_arrival():
    scheduler = schedule(max_sequences=1)
    for uid, priority in enumerate([0, 0, 2, 1]):
        add(scheduler, uid, 3, priority=priority, max_tokens=1)
    order = []
    while step := scheduler.next():
        order += [uid for uid, *_ in shown(step)]
        answer(scheduler, step)
    assert order == [2, 3, 0, 1]


def run(scheduler, steps):
    for _ in range(steps):
        answer(scheduler, scheduler.next())


@pytest.mark.parametrize("host_blocks", [0, 10])
def test_a_full_cache_preempts_the_newest(host_blocks):
    scheduler = schedule(blocks=8, host_blocks=host_blocks)
    old, new = add(scheduler, 0, 9), add(scheduler, 1, 9)
    run(scheduler, 8)
    assert scheduler.stats.preemptions == 0
    run(scheduler, 2)
    assert (new.state, new.blocks, old.state) == (SequenceState.SWAPPED, [], SequenceState.RUNNING)
    assert (scheduler.stats.swapped, scheduler.stats.preemptions) == (1, 1)
    run(scheduler, 8)
    cancel(scheduler, 0)
    step = scheduler.next()
    kept = 4 if host_blocks else 1  # full blocks of the new one, of which the old one took three
    assert shown(step) == [(1, 4 * kept, len(new.tokens) - 4 * kept, True)]
    assert len(step.from_host) == kept - 1
    assert new.cached_tokens == 0
    assert scheduler.stats.prefix_hit_tokens == 0


def test_nothing_begins_where_a_block_was_short():
    scheduler = schedule(blocks=7)
    old, new = add(scheduler, 0, 9), add(scheduler, 1, 9)
    run(scheduler, 2)
    waiting = add(scheduler, 2, 1)
    while new.state is SequenceState.RUNNING:
        step = scheduler.next()
        answer(scheduler, step)
    assert [uid for uid, *_ in shown(step)] == [0]
    assert (len(old.tokens), waiting.state) == (18, SequenceState.WAITING)


def test_a_running_sequence_keeps_a_block_in_reserve_for_each():
    scheduler = schedule(blocks=6)
    add(scheduler, 0, 9)
    run(scheduler, 1)
    add(scheduler, 1, 9)  # three blocks are free: one is for the first
    assert [uid for uid, *_ in shown(scheduler.next())] == [0]


def test_prefixes():
    scheduler = schedule()
    add(scheduler, 0, 12, first=5)
    same_step = add(scheduler, 1, 12, first=5)
    assert shown(scheduler.next()) == [(0, 0, 12, True), (1, 8, 4, True)]
    assert same_step.cached_tokens == 8
    scored = add(scheduler, 2, 12, first=5, prompt_logprobs=0)
    assert shown(scheduler.next())[2:] == [(2, 0, 12, True)]
    assert scored.cached_tokens == 0
    assert scheduler.stats.prefix_hit_tokens == 8


def test_no_prefixes_between_requests():
    scheduler = schedule(prefix_cache=False)
    add(scheduler, 0, 12, first=5)
    add(scheduler, 1, 12, first=5)
    assert shown(scheduler.next()) == [(0, 0, 12, True), (1, 0, 12, True)]


@pytest.mark.parametrize("length", [9, 10, 12])
def test_sequences_of_a_request_share_its_prompt(length):
    scheduler = schedule(max_tokens_per_step=12, prefix_cache=False)
    first, second, third = add(scheduler, 0, length, n=3)
    step = scheduler.next()
    assert shown(step) == [(0, 0, length, True)]
    answer(scheduler, step)
    step = scheduler.next()
    full = (length - 1) // 4
    begin, count = 4 * full, length - 4 * full
    assert shown(step) == [(0, length, 1, True), (1, begin, count, True), (2, begin, count, True)]
    assert [each.cached_tokens for each in (first, second, third)] == [0, 0, 0]
    assert first.blocks[0][:full] == second.blocks[0][:full] == third.blocks[0][:full]
    assert len({each.blocks[0][full] for each in (first, second, third)}) == 3


def test_another_sequence_computes_the_prompt_if_the_first_is_cancelled():
    scheduler = schedule(max_tokens_per_step=4)
    add(scheduler, 0, 6, n=3)
    scheduler.next()
    cancel(scheduler, 0)
    assert shown(scheduler.next()) == [(1, 4, 2, True)]
    assert shown(scheduler.next())[1:] == [(2, 4, 2, True)]


def test_a_fork_waits_for_a_prompt_that_is_computed_again():
    """The first sequence was preempted and has computed a part of its prompt when the second may begin."""
    scheduler = schedule(max_tokens_per_step=5, max_sequences=1)
    first, second = add(scheduler, 0, 10, n=2, max_tokens=4)
    for _ in range(2):
        answer(scheduler, scheduler.next())
    scheduler.reset()
    assert shown(scheduler.next()) == [(0, 0, 5, False)]
    scheduler.config = ScheduleLimits(max_tokens_per_step=12, block_size=4)
    step = scheduler.next()
    assert shown(step) == [(0, 5, 6, True), (1, 8, 2, True)]
    # the blocks that the first fills now are found as a prefix
    assert second.blocks[0][:2] == first.blocks[0][:2]


def test_drafts():
    scheduler = schedule(max_tokens_per_step=8)
    one = add(scheduler, 0, 6, max_tokens=20, ends=[9])
    answer(scheduler, scheduler.next())
    assert scheduler.decoding == [one]
    step = scheduler.next({0: (1, 2, 3), 5: (1,)})
    assert shown(step) == [(0, 6, 4, True)]
    assert step.work[0].drafts == (1, 2, 3)
    assert scheduler.next() is None  # how it goes on is not known
    assert scheduler.decoding == []
    scheduler.collect(step, {0: [1, 2, 5]})
    assert (one.tokens[-3:], one.computed, len(one.tokens)) == ([1, 2, 5], 9, 10)
    step = scheduler.next({0: (1, 9, 3)})
    assert [(each.tokens, each.sequence.finish_reason) for each in scheduler.collect(step, {0: [1, 9, 3, 4]})] == [
        ([1, 9], "stop")
    ]
    assert one.generated[-2:] == [1, 9]
    assert (scheduler.stats.drafted, scheduler.stats.accepted) == (6, 3)


def test_drafts_stay_within_the_budget_and_the_limit():
    scheduler = schedule(max_tokens_per_step=5)
    for uid in range(2):
        add(scheduler, uid, 2, max_tokens=4)
    answer(scheduler, scheduler.next())
    step = scheduler.next({0: [1] * 9, 1: [1] * 9})
    assert shown(step) == [(0, 2, 3, True), (1, 2, 2, True)]


def test_more_tokens_than_drafts():
    scheduler = schedule()
    add(scheduler, 0, 2)
    answer(scheduler, scheduler.next())
    step = scheduler.next({0: [1, 1]})
    with pytest.raises(AssertionError, match="5 tokens for 2 drafts"):
        scheduler.collect(step, {0: [1] * 5})


def test_cancelling_in_every_state():
    scheduler = schedule(blocks=8, max_sequences=3)
    running, preempted = add(scheduler, 0, 9), add(scheduler, 1, 9)
    run(scheduler, 10)
    waiting = add(scheduler, 2, 9)
    in_flight = scheduler.next()
    assert [each.state.value for each in (running, preempted, waiting)] == ["running", "swapped", "waiting"]
    assert [cancel(scheduler, uid) for uid in range(4)] == [True, True, True, False]
    assert {each.finish_reason for each in (running, preempted, waiting)} == {"cancelled"}
    assert answer(scheduler, in_flight) == []
    assert scheduler.next() is None
    stats = scheduler.stats
    assert (stats.waiting, stats.running, stats.swapped, stats.free_blocks) == (0, 0, 0, 8)


def test_many_cancelled_requests_do_not_stay():
    scheduler = schedule(max_sequences=1)
    for uid in range(1000):
        add(scheduler, uid, 3)
    scheduler.next()
    for uid in range(1, 1000):
        assert cancel(scheduler, uid)
    assert len(scheduler._waiting) < 40


def test_an_error_forgets_the_prefix():
    scheduler = schedule()
    for reason, hit in [("cancelled", 8), ("error", 0)]:
        add(scheduler, 0, 12, first=5)
        scheduler.next()
        scheduler.finish(0, reason)
        again = add(scheduler, 1, 12, first=5)
        scheduler.next()
        assert again.cached_tokens == hit
        scheduler.finish(1, "error")


def test_reset_computes_everything_again():
    scheduler = schedule(host_blocks=4)
    one = add(scheduler, 0, 12, first=5)
    run(scheduler, 2)
    in_flight = scheduler.next()
    scheduler.reset()
    assert scheduler.stats.cached_blocks == 0
    assert scheduler.next() is None  # the pending token
    answer(scheduler, in_flight)
    assert shown(scheduler.next()) == [(0, 0, 15, True)]
    assert one.cached_tokens == 0


@pytest.mark.parametrize(
    ("length", "params", "message"),
    [
        (0, {}, "at least one"),
        (64, {}, "64 tokens, and max_context is 64: shorten the prompt to at most 63"),
        (30, {"max_tokens": 12}, "30 tokens, max_tokens is 12, but the whole cache holds 40 tokens"),
        (41, {}, "41 tokens, max_tokens is None, but the whole cache holds 40 tokens"),
    ],
)
def test_what_could_never_fit_is_refused(length, params, message):
    scheduler = schedule(blocks=10, max_context=64)
    made = request(0, length, **params)
    for each in made:
        del each.tokens[length:]
        each.prompt_length = length
    with pytest.raises(UsageError, match=message) as error:
        scheduler.add(made)
    assert isinstance(error.value, RequestTooLarge) == (length > 0)
    assert scheduler.stats.waiting == 0


def test_the_whole_cache_can_be_used():
    scheduler = schedule(blocks=10, max_context=64)
    made = [add(scheduler, 0, 30, max_tokens=11), add(scheduler, 1, 40)]
    while step := scheduler.next():
        answer(scheduler, step)
    assert [(len(each.tokens), each.finish_reason) for each in made] == [(41, "length"), (41, "length")]


def test_a_uid_in_use():
    scheduler = schedule()
    add(scheduler, 0, 3)
    with pytest.raises(UsageError, match="its own uid"):
        add(scheduler, 0, 3)


@pytest.mark.parametrize("key", ["max_tokens_per_step", "max_sequences", "max_context", "block_size"])
def test_limits_that_cannot_work(key):
    with pytest.raises(UsageError, match=f"{key} is 0; it must be at least 1"):
        ScheduleLimits(**{key: 0})
