"""Hostfile grammar: examples of the reference, mistakes, and any file that the grammar allows."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.hosts import MOST_SLOTS, fetch_hostfile, parse_hostfile

NAMES = st.text(st.characters(codec="ascii", exclude_categories=["Z", "C"]), min_size=1).filter(lambda n: n[0] != "#")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("worker-1 slots=2\nworker-2 slots=3", {"worker-1": 2, "worker-2": 3}),
        ("# all of them\n\n  w1\t slots=4 max_slots=8 # fast\n\n#w2 slots=1\n", {"w1": 4}),
        ("b slots=1\na slots=0\n", {"b": 1, "a": 0}),
        ("10.0.0.7 slots=16\r\n", {"10.0.0.7": 16}),
    ],
)
def test_lines(text, hosts):
    found = parse_hostfile(text.splitlines())
    assert found == hosts
    assert list(found) == list(hosts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no host"),
        ("# nothing\n\n", "lists no host"),
        ("w1 slots=1\nw1 slots=2", "line 2: host 'w1' is listed twice"),
        ("w1", "line 1: 'w1' does not name a host and its slots"),
        ("w1 slots=four", "does not name"),
        ("w1 slots=-1", "does not name"),
        ("w1slots=4", "does not name"),
        ("w1 4", "does not name"),
        ("slots=4", "does not name"),
        ("w1 slots=99999999999", "line 1: host 'w1' has slots=99999999999, more than a host can have"),
        ("w1 slots=65537", "more than a host can have"),
        (f"w1 slots={'9' * 5000}", "more than a host can have"),
        (f"{'w' * 10**6}", "does not name"),
    ],
)
def test_mistakes_are_value_errors_that_name_the_line(text, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_hostfile(text.splitlines())
    assert isinstance(raised.value, DeepSpeedError)


@given(st.dictionaries(NAMES, st.integers(0, MOST_SLOTS), min_size=1))
def test_whatever_is_written_is_read(hosts):
    lines = [f"{host} slots={count}" for host, count in hosts.items()]
    assert list(parse_hostfile(lines).items()) == list(hosts.items())


def test_files(tmp_path, caplog, monkeypatch):
    (tmp_path / "hosts").write_text("a slots=2\n")
    assert fetch_hostfile(str(tmp_path / "hosts")) == {"a": 2}
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    assert fetch_hostfile(str(tmp_path / "none")) is None
    assert "there is no hostfile" in caplog.text
    (tmp_path / "bad").write_bytes(b"\xff slots=1")
    with pytest.raises(ValueError, match="cannot be read"):
        fetch_hostfile(str(tmp_path / "bad"))
