"""Verdicts on their way from ranks to the guard."""

from __future__ import annotations

import os

import pytest

from deepspeed.comm.verdict_pipe import VARIABLE, ReportedVerdict, VerdictPipe, tell_launcher


@pytest.fixture
def pipe(monkeypatch):
    pipe = VerdictPipe()
    (variable,) = pipe.environment.items()
    monkeypatch.setenv(*variable)
    yield pipe
    os.close(pipe.source)
    os.close(int(variable[1].rpartition("/")[2]))


def test_the_newest_verdict_of_each_rank_arrives(pipe):
    assert pipe.read() == {}
    tell_launcher(0, (2,), "rank 2 is dead")
    tell_launcher(1, (2, 3), "rank 2 … `next(x)`\n  stacks: /tmp")
    tell_launcher(0, (1,), "rank 1 is dead")
    found = pipe.read()
    assert {rank: (told.ranks, told.text) for rank, told in found.items()} == {
        0: ((1,), "rank 1 is dead"),
        1: ((2, 3), "rank 2 … `next(x)`\n  stacks: /tmp"),
    }
    assert found[0].at >= found[1].at
    assert pipe.read() == {}


def test_a_long_verdict_is_cut(pipe):
    tell_launcher(0, tuple(range(1000)), "…" * 5000)
    (told,) = pipe.read().values()
    assert told.text == "…" * 600
    assert told.ranks == tuple(range(64))


def test_a_full_pipe_is_not_waited_for(pipe):
    for _ in range(100):
        tell_launcher(0, (1,), "x" * 1800)
    assert set(pipe.read()) == {0}


def test_only_the_guards_own_pipe_is_written_to(pipe, monkeypatch, tmp_path):
    other = tmp_path / "file"
    other.write_text("")
    inode = os.environ[VARIABLE].partition(":")[0]
    for value in (f"{inode}:{other}", f"{inode}:{tmp_path / 'none'}", f"x:{other}", "3", ""):
        monkeypatch.setenv(VARIABLE, value)
        tell_launcher(0, (1,), "lost")
    monkeypatch.delenv(VARIABLE)
    tell_launcher(0, (1,), "lost")
    assert other.read_text() == ""
    assert pipe.read() == {}


def test_what_others_write_into_the_pipe_is_passed_over(pipe):
    descriptor = os.open(os.environ[VARIABLE].partition(":")[2], os.O_WRONLY)
    os.write(descriptor, b'hello\n[1]\n[0, 1, "x", 2]\n{}\n[0, [1], "half')
    tell_launcher(1, (0,), "lost with the line before it")
    tell_launcher(2, (0,), "whole")
    os.close(descriptor)
    assert set(pipe.read()) == {2}


def test_a_verdict_explains_an_end_that_follows_soon():
    assert ReportedVerdict((1,), "x", 100.0).explains(101.0)
    assert not ReportedVerdict((1,), "x", 100.0).explains(1000.0), "the rank went on"
    assert not ReportedVerdict((), "nobody is at fault", 100.0).explains(101.0)
