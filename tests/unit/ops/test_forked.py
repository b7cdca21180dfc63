"""Work in forked processes: every piece once, what fails or is killed is left over, nothing survives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

from deepspeed.ops.forked import CAN_FORK, forked

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="processes that die with their parent: Linux")


BEFORE = set()


def children():
    """Of this process, which may have had some before: other tests keep servers."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.add(int(stat.parent.name))
    return found


def done(work, pieces, count, stop=None):
    """(what is left over, what was heard)."""
    heard = {}
    BEFORE.clear()
    BEFORE.update(children())
    left = forked(work, pieces, count, heard.__setitem__, stop=stop or threading.Event(), quiet=nullcontext())
    return left, heard


def no_child_is_left():
    return children() <= BEFORE


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_every_piece_is_done_once_and_elsewhere(tmp_path, count):
    def work(piece):
        (tmp_path / f"{piece}-{os.getpid()}").touch()
        return piece / 2

    left, heard = done(work, 7, count)
    assert (left, heard) == ([], {piece: piece / 2 for piece in range(7)})
    made = [each.name.split("-") for each in tmp_path.iterdir()]
    assert sorted(int(piece) for piece, _ in made) == list(range(7))
    assert str(os.getpid()) not in {process for _, process in made}
    assert no_child_is_left()


def test_all_processes_work_at_the_same_time(tmp_path):
    """Each waits until all have begun."""

    def work(piece):
        (tmp_path / str(piece)).touch()
        until = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 5:
            assert time.monotonic() < until, "the others have not begun"
            time.sleep(0.01)
        return 1.0

    assert done(work, 5, 5)[0] == []


def test_a_piece_that_fails_and_one_whose_worker_is_killed_are_left(capfd):
    def work(piece):
        if piece == 1:
            os.write(2, b"not to be seen")
            raise ValueError("no such register")
        if piece == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    left, heard = done(work, 6, 3)
    assert {1, 2} <= {*left}
    assert sorted([*left, *heard]) == list(range(6)), "of those that die with their parent pieces are left, too"
    assert capfd.readouterr().err == ""
    assert no_child_is_left()


def test_one_worker_that_is_killed_leaves_the_rest():
    def work(piece):
        if piece == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    assert done(work, 4, 1)[0] == [1, 2, 3]


def test_stopped_work_is_ended():
    stop = threading.Event()

    def work(piece):
        time.sleep(600)
        return 0.0

    threading.Timer(0.2, stop.set).start()
    assert done(work, 2, 2, stop)[0] == [0, 1]
    assert no_child_is_left()


def test_silent_workers_are_ended(monkeypatch):
    monkeypatch.setattr("deepspeed.ops.forked._SILENT_S", 0.5)

    def work(piece):
        time.sleep(600 if piece == 0 else 0)
        return 0.0

    assert done(work, 2, 2)[0] == [0]
    assert no_child_is_left()


def test_nothing_is_said_of_threads():
    """Python 3.12 warns of a fork in a process that has some."""
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert done(lambda piece: 0.0, 1, 1)[0] == []
    finally:
        go.set()
        thread.join()


PARENT = """
import os, sys, threading, time
from contextlib import nullcontext
from deepspeed.ops.forked import forked

def work(piece):
    open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
    time.sleep(600)
    return 0.0

forked(work, 3, 3, print, stop=threading.Event(), quiet=nullcontext())
"""


def test_workers_die_with_their_parent(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    until = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) < 3:
        assert parent.poll() is None, "it ended before its workers had begun"
        assert time.monotonic() < until, "the workers have not begun"
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    for each in tmp_path.iterdir():
        while os.path.exists(f"/proc/{each.name}") and _lives(each.name):
            assert time.monotonic() < until, f"process {each.name} has outlived its parent"
            time.sleep(0.05)


def _lives(process):
    """Not merely waiting for somebody to ask how it ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
