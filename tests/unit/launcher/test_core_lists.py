"""Core lists of the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher.binding import parse_range_list


def test_the_documented_example():
    assert parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    assert parse_range_list("7") == [7]
    assert parse_range_list("3-3,4") == [3, 4]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_ascending_ranges(steps):
    """Each pair is the gap before a range and how many cores follow its first."""
    parts, cores, at = [], [], -1
    for gap, more in steps:
        first = at + gap
        at = first + more
        parts.append(f"{first}-{at}" if more else str(first))
        cores.extend(range(first, at + 1))
    assert parse_range_list(",".join(parts)) == cores


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "neither a number"),
        ("0, 2", "neither a number"),
        ("0,,2", "neither a number"),
        ("-1", "neither a number"),
        ("1-", "neither a number"),
        ("1-2-3", "neither a number"),
        ("a", "neither a number"),
        ("0-99999999999", "neither a number"),
        ("4-2", "descends"),
        ("2,1", "ascend"),
        ("0-3,3-5", "not overlap"),
        ("1,1", "already listed"),
    ],
)
def test_what_is_not_a_core_list(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_range_list(text)
