"""The verdict over made-up reports: whoever was made to be at fault is named, and nobody else."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepspeed.comm.watch.inquiry import judge_locally
from deepspeed.comm.watch.report import CollectiveCall, GroupProgress, RankReport, WaitingCall, as_text, from_text
from deepspeed.comm.watch.verdict import judge

OPS = ["all_reduce", "broadcast", "all_gather_into_tensor", "barrier", "reduce_scatter_tensor"]


def a_call(sequence, op="all_reduce", **more):
    return CollectiveCall(
        "world", "world", sequence, op, **{"dtype": "float32", "numel": 8, "shape": "float32[8]", **more}
    )


def history(upto, ops):
    return tuple(a_call(n, ops[n % len(ops)], place=f"train.py:{n}") for n in range(max(1, upto - 31), upto + 1))


def healthy(rank, ranks, sequence, ops):
    """A rank that waits in the newest call."""
    calls = history(sequence, ops)
    wait = WaitingCall(calls[-1], ranks, 3.0, "train.py:40 `step()`")
    return RankReport(rank, "host", waits=(wait,), groups={"world": GroupProgress(sequence, sequence, calls)})


@st.composite
def jobs(draw):
    """Ranks, the number of the call that hangs, and the operations of the loop."""
    world = draw(st.integers(2, 12))
    sequence = draw(st.integers(2, 10_000))
    ops = draw(st.lists(st.sampled_from(OPS), min_size=1, max_size=7))
    ranks = tuple(range(world))
    reports = {rank: healthy(rank, ranks, sequence, ops) for rank in ranks}
    culprit = draw(st.integers(0, world - 1))
    waiter = draw(st.sampled_from([rank for rank in ranks if rank != culprit]))
    return reports, reports[waiter].waits[0], culprit


@given(jobs(), st.integers(1, 5))
def test_a_late_rank_is_named_with_its_place(job, behind):
    reports, wait, culprit = job
    last = wait.call.sequence - behind
    assume(last >= 0)
    old = reports[culprit].groups["world"].calls
    calls = tuple(call for call in old if call.sequence <= last)
    place = "train.py:88 `next(loader)`"
    reports[culprit] = RankReport(culprit, "host", main=place, groups={"world": GroupProgress(last, last, calls)})
    found = judge(wait, reports)
    assert found.ranks == (culprit,)
    assert found.text == f"rank {culprit} never entered {wait.call}; its main thread is in {place}"
    assert judge(wait, reports, over=False).text.startswith(f"rank {culprit} has not yet entered")


@given(jobs())
def test_nobody_is_blamed_where_all_are_there(job):
    reports, wait, _ = job
    found = judge(wait, reports)
    assert found.ranks == ()
    assert "all entered" in found.text


@given(jobs())
def test_a_rank_that_entered_while_it_was_asked_is_late(job):
    reports, wait, culprit = job
    (own,) = reports[culprit].waits
    reports[culprit] = replace(reports[culprit], waits=(replace(own, seconds=0.4),))
    found = judge(wait, reports)
    assert found.ranks == (culprit,)
    assert found.text == f"rank {culprit} entered {wait.call} 3 s later than others, at train.py:40 `step()`"
    # Where another rank never came, one that came late does not matter.
    worse = next(rank for rank in reports if rank != culprit)
    reports[worse] = RankReport(worse, condition="is dead")
    assert judge(wait, reports).ranks == (worse,)


@given(jobs())
def test_the_network_is_not_suspected_where_a_rank_has_left_the_call(job):
    reports, wait, culprit = job
    reports[culprit] = replace(reports[culprit], waits=(), main="train.py:99 `retry()`")
    found = judge(wait, reports)
    assert found.ranks == ()
    assert "is stuck" not in found.text
    assert f"left it on ranks {culprit}, with a result or an error of their own; the main thread of rank" in found.text
    assert "train.py:99 `retry()`" in found.text


@given(jobs(), st.sampled_from(["is dead: its process 7 was killed", "is stopped: SIGSTOP"]), st.booleans())
def test_a_rank_that_cannot_answer(job, condition, told):
    reports, wait, culprit = job
    reports[culprit] = replace(reports[culprit], waits=(), condition=condition)
    if not told:
        del reports[culprit]
    found = judge(wait, reports)
    assert found.ranks == (culprit,)
    assert found.text.startswith(f"rank {culprit} {condition if told else 'does not answer'}")
    assert not told or "the last that it entered is" in found.text


@given(jobs())
def test_a_rank_that_ended(job):
    reports, wait, culprit = job
    reports[culprit] = RankReport(culprit, ended="ended with ValueError: no, raised at train.py:9")
    assert judge(wait, reports).text == f"rank {culprit} ended with ValueError: no, raised at train.py:9"


@given(jobs(), st.sampled_from(["op", "dtype", "shape", "root"]), st.integers(0, 31), st.data())
def test_the_first_difference_is_told(job, kind, back, data):
    reports, wait, culprit = job
    assume(len(reports) > 2)
    at = wait.call.sequence - back
    calls = list(reports[culprit].groups["world"].calls)
    assume(calls[0].sequence <= at)
    index = at - calls[0].sequence
    assume(kind == "op" or calls[index].op != "barrier")
    assume(kind != "root" or calls[index].op == "broadcast")
    changes = {
        "op": {"op": "all_to_all"},
        "dtype": {"dtype": "float16"},
        "shape": {"numel": 9, "shape": "float32[9]"},
        "root": {"peer": 5},
    }
    for later in range(index, len(calls)):  # what follows differs as well, and is not what is told
        calls[later] = replace(calls[later], **changes[kind] if later == index else {"op": "scatter"})
    waiting = WaitingCall(calls[-1], wait.ranks, 3.0, calls[-1].place)
    reports[culprit] = replace(
        reports[culprit], waits=(waiting,), groups={"world": GroupProgress(wait.call.sequence, None, tuple(calls))}
    )
    found = judge(wait, reports)
    words = {"op": "", "dtype": "the dtype of ", "shape": "the shape of ", "root": "the root of "}
    assert found.ranks == (culprit,)
    assert found.text.startswith(f"ranks differ in {words[kind]}operation {at} of group world: rank {culprit} entered")


@given(st.integers(2, 8), st.integers(0, 3))
def test_a_chain_of_waits_ends_at_its_root(length, extra):
    """Rank 0 waits for rank 1 in one group, that for rank 2 in another, …: the last one's main thread is elsewhere."""
    ranks = length + 1 + extra
    reports = {}
    for rank in range(length):
        call = CollectiveCall(f"g{rank}", f"g{rank}", 5, "all_reduce")
        wait = WaitingCall(call, (rank, rank + 1), 2.0, f"train.py:{rank}")
        before = {f"g{rank - 1}": GroupProgress(4, 4)} if rank else {}
        reports[rank] = RankReport(rank, waits=(wait,), groups={**before, f"g{rank}": GroupProgress(5, 5, (call,))})
    reports[length] = RankReport(
        length, main="train.py:88 `next(loader)`", groups={f"g{length - 1}": GroupProgress(4, 4)}
    )
    for rank in range(length + 1, ranks):
        reports[rank] = RankReport(rank, main="elsewhere")
    found = judge(reports[0].waits[0], reports)
    assert found.ranks[0] == length
    assert found.text.startswith(f"rank {length} never entered all_reduce 5 on group g{length - 1}; its main thread")
    assert set(found.ranks) == set(range(1, length + 1))


def test_ranks_that_wait_for_each_other():
    one, other = CollectiveCall("a", "a", 3, "all_reduce"), CollectiveCall("b", "b", 8, "barrier")
    reports = {
        0: RankReport(
            0,
            waits=(WaitingCall(one, (0, 1), 2.0, "train.py:1"),),
            groups={"a": GroupProgress(3, 3), "b": GroupProgress(7, 7)},
        ),
        1: RankReport(
            1,
            waits=(WaitingCall(other, (0, 1), 2.0, "train.py:2"),),
            groups={"a": GroupProgress(2, 2), "b": GroupProgress(8, 8)},
        ),
    }
    found = judge(reports[0].waits[0], reports)
    assert "wait for each other: they make these calls in different orders" in found.text
    assert set(found.ranks) == {0, 1}


def test_many_culprits_are_counted():
    call = a_call(3)
    reports = {
        rank: RankReport(rank, main="train.py:88", groups={"world": GroupProgress(2, 2)}) for rank in range(1, 1000)
    }
    wait = WaitingCall(call, tuple(range(1000)), 2.0, "train.py:1")
    reports[0] = RankReport(0, waits=(wait,), groups={"world": GroupProgress(3, 3, (call,))})
    found = judge(wait, reports)
    assert len(found.ranks) == 999
    assert "and 991 more" in found.text
    assert len(found.text) < 2000


def test_messages_ask_for_the_peer():
    call = CollectiveCall("world", "world", 4, "recv", p2p=True, peer=2)
    wait = WaitingCall(call, (0, 1, 2), 2.0, "train.py:1")
    reports = {rank: RankReport(rank, main=f"train.py:{rank}") for rank in (0, 1, 2)}
    found = judge(wait, {**reports, 0: RankReport(0, waits=(wait,))})
    assert found.ranks == (2,)
    assert found.text == "rank 2 did not do its part of recv 4 on group world; its main thread is in train.py:2"


@pytest.mark.parametrize(("entered", "blamed"), [(4, (1,)), (5, ()), (6, ())])
def test_who_did_its_part_of_a_launched_call_may_go(entered, blamed):
    call = a_call(5, launched=True)
    wait = WaitingCall(call, (0, 1), 2.0, "")
    reports = {
        0: RankReport(0, groups={"world": GroupProgress(5, 5, (call,))}),
        1: RankReport(1, ended="has finished its program", groups={"world": GroupProgress(entered, entered)}),
    }
    assert judge(wait, reports).ranks == blamed


@given(jobs())
def test_reports_travel(job):
    reports, _, culprit = job
    whole = replace(reports[culprit], seen={3: reports[culprit]}, stacks="/tmp/x", asked=7)
    assert from_text(as_text(whole)) == whole


def test_a_process_that_is_on_its_way_out_is_waited_for():
    """Without the store: connections of a killed rank break before its process is seen as dead."""
    ranks, ops = (0, 1, 2), ["all_reduce"]
    own = healthy(1, ranks, 3, ops)
    behind = {"world": GroupProgress(2, 2, history(2, ops))}
    seen = iter([RankReport(0, groups=behind), RankReport(0, groups=behind)])
    dead = RankReport(0, condition="is dead: its process 7 on host was killed or crashed", groups=behind)
    ended = RankReport(2, ended="ended with CommError", groups=behind)
    neighbours = {
        0: SimpleNamespace(report=lambda: next(seen, dead)),
        2: SimpleNamespace(report=lambda: ended),
    }
    found = judge_locally(own.waits[0], own, SimpleNamespace(neighbours=SimpleNamespace(found=neighbours)))
    assert found.ranks == (0, 2)
    assert found.text.startswith("rank 0 is dead: its process 7 on host")
