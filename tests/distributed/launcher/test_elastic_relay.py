"""The relay of an elastic job with programs of this machine in the place of ssh: hosts are lost, and come again."""

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
HEAD = """
import os, signal, sys
def tell(line):
    with open("mailbox", "w") as box: box.write(str(line) + chr(10))
def once(name):
    try: os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError: return False
    return True
"""
UNTIL_TOLD = "open('go').read()\n"  # a named pipe that the test opens


def relay(folder, *links):
    plan = RelayPlan(links=links, world=len(links), token=TOKEN, elastic=True, again=0.1)

    def main(_):
        sys.exit(supervise(plan, os.environ))

    return Launched([], folder, main=main)


def host(name, text):
    return Link(host=name, command=[sys.executable, "-u", "-c", HEAD + text], opening=b"x")


@ranks(1, init=False)
def test_a_lost_host_is_tried_again_while_another_works(tmp_path):
    os.mkfifo(tmp_path / "go")
    box = Mailbox(tmp_path)
    lost = (
        "if once('first') or once('second'): os.kill(os.getpid(), 9) if once('third') else sys.exit(255)\ntell('back')"
    )
    with relay(tmp_path, host("a", UNTIL_TOLD), host("b", lost)) as job:
        assert box.lines(1) == ["back"]
        (tmp_path / "go").write_text("")
        assert job.wait() == 0
    assert job.errors().count("host b is lost") == 2
    assert "was killed by SIGKILL (signal 9)): the job goes on without it" in job.errors()
    assert "exited with code 255): the job goes on without it" in job.errors()


@ranks(1, init=False)
def test_a_job_that_ends_well_without_a_lost_host_ended_well(tmp_path):
    os.mkfifo(tmp_path / "go")
    box = Mailbox(tmp_path)
    with relay(tmp_path, host("a", UNTIL_TOLD), host("b", "tell('lost')\nsys.exit(255)")) as job:
        box.lines(2)
        (tmp_path / "go").write_text("")
        assert job.wait() == 0
    assert "tried again" in job.errors()


@ranks(1, init=False)
def test_when_every_host_is_lost_the_job_is(tmp_path):
    lost = host("a", "print('no route', file=sys.stderr)\nsys.exit(255)")
    with relay(tmp_path, lost) as job:
        assert job.wait() == 255
    assert "host a: " in job.errors()
    assert "    | no route" in job.errors()


@ranks(1, init=False)
def test_an_agent_that_gives_up_ends_the_job_on_all_hosts(tmp_path):
    box = Mailbox(tmp_path)
    other = "tell('up')\ntell(sys.stdin.buffer.read(2)[1])\nsys.exit(9)"
    failing = "open('go').read()\nsys.exit(7)"
    os.mkfifo(tmp_path / "go")
    with relay(tmp_path, host("a", failing), host("b", other)) as job:
        assert box.lines(1) == ["up"]
        (tmp_path / "go").write_text("")
        assert box.numbers(1) == [signal.SIGTERM]
        assert job.wait() == 7


@ranks(1, init=False)
def test_ranks_that_print_the_words_of_guards_change_nothing(tmp_path):
    message = encode(TOKEN, 0, {"rank": 0, "host": "h", "kind": "failed", "code": 3})
    with relay(tmp_path, host("a", f"os.write(2, {message!r})\nprint('on')")) as job:
        assert job.wait() == 0
    assert job.output() == "on\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@ranks(1, init=False)
def test_signals_end_every_program_and_nothing_is_tried_again(tmp_path, number):
    box = Mailbox(tmp_path)
    text = "tell(os.getpid())\nsys.stdin.buffer.read(2)\nsys.exit(1)"
    with relay(tmp_path, host("a", text), host("b", text)) as job:
        watched = [os.pidfd_open(pid) for pid in box.numbers(2)]
        job.send(number)
        assert job.wait() == (-number if number == signal.SIGKILL else 128 + number)
        assert all(gone(each) for each in watched)
    assert "tried again" not in job.errors()


@pytest.mark.slow
@ranks(1, init=False)
def test_an_elastic_job_of_one_host_with_labels(tmp_path):
    script(
        tmp_path, "print('hello', flush=True)\nsys.exit(4) if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0"
    )
    words = ["--num_gpus=2", "--output=rank", "--elastic_training", "script.py"]
    with Launched(words, tmp_path, main=runner.main) as job:
        assert job.wait() == 0, job.errors()
    assert set(job.output().splitlines()) == {"[0] hello", "[1] hello"}
    assert "failed first: it exited with code 4" in job.errors()


@pytest.mark.parametrize("launcher", ["pdsh", "slurm"])
@ranks(1, init=False)
def test_launchers_that_cannot_lose_a_host(tmp_path, launcher):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["--hostfile=hosts", "--elastic_training", f"--launcher={launcher}", "script.py"]
    with Launched(words, tmp_path, main=runner.main) as job:
        assert job.wait() == 2
    assert f"--elastic_training with --launcher {launcher}" in job.errors()
