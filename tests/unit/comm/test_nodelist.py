"""Slurm's host lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.discover import first_host
from deepspeed.errors import RendezvousError


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu5", "gpu5"),
        ("node[01-03,7]", "node01"),
        ("a,b-c.d", "a"),
        ("a[1-2],b,c[08-10]x", "a1"),
        ("r[1-2]n[0,5]", "r1n0"),
        (" n[ 9-11] ", "n9"),
        ("c[08-10]x,a[1-2]", "c08x"),
    ],
)
def test_first_host(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", " ", "n[", "n]1", "n[a-b]", "n[]", "a,,b", ",a", "n[1-2-3]"])
def test_malformed_lists_say_so(text):
    with pytest.raises(RendezvousError, match="MASTER_ADDR"):
        first_host(text)


def _ranges(numbers, width):
    """The compact form Slurm writes: runs of consecutive numbers joined."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a).zfill(width) + (f"-{str(b).zfill(width)}" if b > a else "") for a, b in runs)


prefixes = st.from_regex(r"[a-z][a-z.-]{0,5}", fullmatch=True)


@given(
    st.lists(
        st.tuples(prefixes, st.sets(st.integers(0, 300), min_size=1), st.integers(1, 4), prefixes),
        min_size=1,
        max_size=4,
    )
)
def test_compact_lists_of_many_hosts(parts):
    hosts, items = [], []
    for prefix, numbers, width, suffix in parts:
        ordered = sorted(numbers)
        hosts += [f"{prefix}{str(number).zfill(width)}{suffix}" for number in ordered]
        items.append(f"{prefix}[{_ranges(ordered, width)}]{suffix}")
    assert first_host(",".join(items)) == hosts[0]
