"""Call logs: what was written is read, also by others, also when it is more than fits."""

import os
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.operations import OPERATIONS
from deepspeed.comm.records import GroupRecord
from deepspeed.comm.watch import report
from deepspeed.comm.watch.report import SIZE, SLOTS, CallLog, open_log, progress_of, read_calls, read_end

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files")
WORLD = GroupRecord("world", (0, 1), 0, "gloo", {})


def an_entry(sequence, op="all_reduce", shape=(2, 3), label=None, group=WORLD):
    frame = sys._getframe()
    known = torch.Size(shape)
    return (sequence, OPERATIONS[op], group, known, torch.float32, label, frame.f_code, frame.f_lasti, None)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["all_reduce", "all_gather", "reduce_scatter_tensor"]),
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from([None, "layers.0.weight", "größe"]),
        ),
        max_size=3 * SLOTS,
    )
)
def test_the_last_calls_are_read_in_order(calls):
    mine = CallLog()
    for number, (op, shape, label) in enumerate(calls, 1):
        mine.note(an_entry(number, op, shape, label))
    theirs = open_log(f"/proc/self/fd/{mine.fd}")
    found = read_calls(theirs)
    kept = list(enumerate(calls, 1))[-SLOTS:]
    assert [(call.sequence, call.op, call.label) for call in found] == [(n, op, label) for n, (op, _, label) in kept]
    assert [call.shape for call in found] == [f"float32{shape}" for _, (_, shape, _) in kept]
    theirs.close()
    mine.close()


def test_descriptions_that_do_not_fit_are_left_out():
    mine = CallLog()
    for number in range(1, SIZE // 100):
        mine.note(an_entry(number, label=f"a label of its own, number {number}"))
    theirs = open_log(f"/proc/self/fd/{mine.fd}")
    assert read_calls(theirs) == []
    mine.note(an_entry(SIZE, label="a label of its own, number 1"))
    assert [call.sequence for call in read_calls(theirs)] == [SIZE]
    theirs.close()
    mine.close()


def test_it_outlives_its_owner():
    mine = CallLog()
    theirs = open_log(f"/proc/self/fd/{mine.fd}")
    mine.note(an_entry(7))
    mine.write_end("ended with ValueError: größe")
    mine.close()
    assert [call.sequence for call in read_calls(theirs)] == [7]
    assert read_end(theirs) == "ended with ValueError: größe"


def test_last_words_may_be_long():
    mine = CallLog()
    mine.write_end("x" * SIZE)
    theirs = open_log(f"/proc/self/fd/{mine.fd}")
    assert set(read_end(theirs)) == {"x"}
    assert read_calls(theirs) == []


def test_what_is_no_log_is_refused():
    other = os.memfd_create("other")
    os.ftruncate(other, SIZE)
    with pytest.raises(ValueError, match="is not a call log"):
        open_log(f"/proc/self/fd/{other}")
    os.close(other)


def test_how_far_a_rank_was_in_each_group():
    group = GroupRecord("3", (0, 1), 0, "gloo", {}, "dp")
    mine = CallLog()
    for sequence in (1, 2):
        mine.note(an_entry(sequence))
        mine.note(an_entry(sequence + 5, group=group))
    found = progress_of(read_calls(open_log(f"/proc/self/fd/{mine.fd}")))
    assert {name: member.entered for name, member in found.items()} == {"world": 2, "3": 7}
    assert [call.title for call in found["3"].calls] == ["dp", "dp"]
    assert report.SLOTS == 64
