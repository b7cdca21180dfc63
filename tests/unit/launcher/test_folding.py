"""Labels and folding of the lines of many ranks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher.binding import parse_range_list
from deepspeed.launcher.output import WINDOW, LineFolder, labelled, split_label


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"a\nb\n", b"[3] a\n[3] b\n"),
        (b"a", b"[3] a\n"),
        (b"10%\r20%\r\nend\n", b"[3] 10%\n[3] 20%\n[3] end\n"),
        (b"\n", b"[3] \n"),
        (b"", b""),
    ],
)
def test_labels(data, wanted):
    assert labelled(data, b"[3] ") == wanted


@pytest.mark.parametrize("line", [b"text", b"[2026-01-01] x", b"[3]x", b"[a] x", b""])
def test_lines_without_a_label(line):
    assert split_label(line) == (None, line)
    assert split_label(b"[12] " + line) == (12, line)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def fold():
    written, clock = [], Clock()
    made = LineFolder(4, written.append, clock)
    made.written, made.clock = written, clock
    return made


def test_what_all_ranks_say_is_written_at_once(fold):
    for rank in (2, 0, 3):
        fold.add(rank, b"x")
        assert fold.written == []
    fold.add(1, b"x")
    assert fold.written == [b"[0-3] x\n"]


def test_what_some_say_waits_a_moment(fold):
    fold.add(0, b"x")
    fold.add(2, b"x")
    assert fold.flush() == WINDOW
    fold.clock.now = WINDOW
    assert fold.flush() is None
    assert fold.written == [b"[0,2] x\n"]


def test_the_same_line_twice(fold):
    fold.add(0, b"x")
    fold.add(0, b"x")
    fold.flush(everything=True)
    assert fold.written == [b"[0] x\n", b"[0] x\n"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c"]), st.floats(0, 0.2)), max_size=40))
def test_every_rank_keeps_its_lines_and_their_order(said):
    written, clock = [], Clock()
    fold = LineFolder(4, written.append, clock)
    for rank, text, passed in said:
        clock.now += passed
        fold.add(rank, text)
    fold.flush(everything=True)
    for rank in range(4):
        seen = []
        for line in written:
            found = re.fullmatch(rb"\[([\d,-]+)\] (.)\n", line)
            if rank in parse_range_list(found[1].decode()):
                seen.append(found[2])
        assert seen == [text for who, text, _ in said if who == rank]
