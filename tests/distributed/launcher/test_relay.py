"""The relay with programs of this machine in the place of ssh: whose failure counts, what is shown, what ends."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from deepspeed.launcher import runner
from deepspeed.launcher.protocol import Link, RelayPlan, encode, new_token
from deepspeed.launcher.supervise import supervise
from tests.distributed.launcher.launched import Launched, Mailbox, gone, script
from tests.harness import ranks

TOKEN = new_token()


def relay(folder, *links, style="plain", **options):
    """The launcher's side of a job whose links are these."""
    plan = RelayPlan(links=links, world=len(links), token=TOKEN, style=style, **options)

    def main(_):
        sys.exit(supervise(plan, os.environ))

    return Launched([], folder, main=main)


def program(text, host="", **options):
    head = "import os, signal, sys, time\ndef wait():\n    while True: signal.pause()\n"
    return Link(host=host, command=[sys.executable, "-u", "-c", head + text], **options)


def tells(rank, **message):
    """A line of code that tells the relay something."""
    return f"os.write(2, {encode(TOKEN, rank, {'rank': rank, 'host': 'h', **message})!r})\n"


@ranks(1, init=False)
def test_all_is_well(tmp_path):
    first = program("print('out'); print('err', file=sys.stderr)", host="a")
    with relay(tmp_path, first, program("print('[1] out')", host="b"), style="rank") as job:
        assert job.wait() == 0
    assert sorted(job.output().splitlines()) == ["[1] out", "a: out"]
    assert job.errors() == "a: err\n"


@ranks(1, init=False)
def test_the_first_message_decides_not_the_first_end(tmp_path):
    """Link a tells of a failure, then waits for the end of b, whose code is another one."""
    os.mkfifo(tmp_path / "gone")
    slow = program(
        tells(0, kind="failed", code=7)
        + "open('gone').read()\n"
        + tells(0, kind="story", text="STORY")
        + "sys.exit(7)",
        host="a",
        opening=b"x",
    )
    quick = program(
        "sys.stdin.read(2)\n" + tells(1, kind="failed", code=3) + "open('gone', 'w').close(); sys.exit(3)",
        host="b",
        opening=b"x",
    )
    with relay(tmp_path, slow, quick) as job:
        assert job.wait() == 7
    assert "STORY" in job.errors()
    assert "rank 1" not in job.errors(), "it was told to stop"


@ranks(1, init=False)
def test_a_failure_without_a_story(tmp_path):
    with relay(tmp_path, program(tells(5, kind="failed", code=-9) + "sys.exit(1)")) as job:
        assert job.wait() == 137
    assert "rank 5 failed first: it was killed by SIGKILL (signal 9)" in job.errors()


@ranks(1, init=False)
def test_a_link_that_breaks(tmp_path):
    """As ssh to a host that is not there; the other host hears SIGTERM as a byte."""
    box = Mailbox(tmp_path)
    other = f"open({str(box.path)!r}, 'w').write(str(sys.stdin.buffer.read(2)[1]) + chr(10))"
    broken = program("print('no route', file=sys.stderr); sys.exit(255)", host="a")
    with relay(tmp_path, broken, program(other, host="b", opening=b"x")) as job:
        assert job.wait() == 255
        assert box.numbers(1) == [signal.SIGTERM]
    assert "host a: " in job.errors()
    assert "    | no route" in job.errors()


@ranks(1, init=False)
def test_messages_that_are_none(tmp_path):
    text = tells(0, kind="other") + f"os.write(2, {encode(TOKEN, 9, {'no': 'rank'})!r})\nprint('on')"
    with relay(tmp_path, program(text)) as job:
        assert job.wait() == 0
    assert job.output() == "on\n"


@ranks(1, init=False)
def test_links_that_are_no_job_go_on(tmp_path):
    links = [program(f"sys.exit({code})", host=f"h{code}") for code in (3, 0, 5)]
    with relay(tmp_path, *links, style="host", independent=True) as job:
        assert job.wait() == 5
    assert "host h3: " in job.errors()
    assert "host h5: " in job.errors()


@ranks(1, init=False)
def test_a_program_that_cannot_be_started(tmp_path):
    with relay(tmp_path, Link(host="a", command=["/no/such/program"])) as job:
        assert job.wait() == 127
    assert "host a: /no/such/program could not be started" in job.errors()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@ranks(1, init=False)
def test_signals_end_every_program(tmp_path, number):
    """One hears bytes and the end of its stdin, the other a signal."""
    box = Mailbox(tmp_path)
    hello = f"open({str(box.path)!r}, 'w').write(str(os.getpid()) + chr(10))\n"
    hearing = program(hello + "sys.stdin.buffer.read(2)\nsys.exit(9)", opening=b"x")
    with relay(tmp_path, hearing, program(hello + "wait()")) as job:
        found = [os.pidfd_open(pid) for pid in box.numbers(2)]
        job.send(number)
        assert job.wait() == (-number if number == signal.SIGKILL else 128 + number)
    assert all(gone(pidfd) for pidfd in found)


# ---- on one host, with real ranks


@pytest.mark.slow
@ranks(1, init=False)
def test_lines_of_ranks_are_folded(tmp_path):
    _turn = Mailbox(tmp_path, "turn")
    # The failure of rank 1 ends the others, which must have spoken before.
    ends = "if rank == 1: hear('turn'), hear('turn'), sys.exit(6)\ntell(0, 'turn')"
    script(tmp_path, f"print('same'); print('own', rank)\n{ends}")
    with Launched(["--num_gpus=3", "--output=fold", "script.py"], tmp_path, main=runner.main) as job:
        assert job.wait() == 6, job.errors()
    lines = job.output().splitlines()
    assert sorted(line for line in lines if "own" in line) == [f"[{n}] own {n}" for n in range(3)]
    assert {line.partition("] ")[2] for line in lines} == {"same", "own 0", "own 1", "own 2"}
    assert "rank 1 failed first: it exited with code 6" in job.errors()
