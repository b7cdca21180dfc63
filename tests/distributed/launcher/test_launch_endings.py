"""How jobs end: failures named, signals passed on, and no process left in any case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launcher.launched import Launched, Mailbox, gone, local, script
from tests.harness import ROOT, ranks
from tests.hosts import wait_for

# A rank with a child, and with a daemon that left its session and its parent.
FAMILY = """
child = subprocess.Popen(["sleep", "1000"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        tell(os.getpid())
        wait_forever()
    os._exit(0)
tell(os.getpid())
tell(child.pid)
"""


@pytest.mark.parametrize(("how", "code"), [("sys.exit(3)", 3), ("os.abort()", 134), ("raise ValueError('no')", 1)])
@ranks(1, init=False)
def test_the_exit_status_is_that_of_the_rank_that_failed_first(tmp_path, how, code):
    script(tmp_path, f"if rank == 1: {how}\nwait_forever()")
    with Launched(local(3, "script.py"), tmp_path) as job:
        assert job.wait() == code
    assert "rank 1 failed first" in job.errors()
    assert "stopped because of this: ranks 0, 2" in job.errors()


@ranks(1, init=False)
def test_the_message_has_all_that_is_needed(tmp_path):
    text = """
print("only on stdout")
if rank == 2:
    for i in range(30): print("trace", i, file=sys.stderr)
    sys.stderr.write("the cause")
    sys.stderr.flush()
    os._exit(41)
wait_forever()
"""
    script(tmp_path, text)
    with Launched(local(3, "script.py", "--api_key=abc", "--lr", "1"), tmp_path) as job:
        assert job.wait() == 41
    message = job.errors().split("rank 2 failed first: it exited with code 41")[1].splitlines()
    assert f"host {os.uname().nodename}, local rank 2, pid " in message[1]
    assert message[2].startswith("  command: ")
    assert message[2].endswith("script.py --local_rank=2 '--api_key=********' --lr 1")
    assert message[3] == "  its last lines (stderr):"
    assert message[4:24] == [f"    | trace {i}" for i in range(11, 30)] + ["    | the cause"]
    assert message[24] == "  stopped because of this: ranks 0, 1"
    assert "abc" not in job.errors()


@ranks(1, init=False)
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path):
    box = Mailbox(tmp_path)
    script(tmp_path, "print('last words', rank, file=sys.stderr)\ntell(f'{rank} {os.getpid()}')\nwait_forever()")
    with Launched(local(2, "script.py"), tmp_path) as job:
        first, second = (int(line.split()[1]) for line in box.lines(2))
        os.kill(second, signal.SIGKILL)
        assert job.wait() == 137
        assert not alive(first)
    assert "killing" not in job.errors(), "the other rank ended when it was asked to"
    assert "rank 1 failed first: it was killed by SIGKILL (signal 9)" in job.errors()
    assert f"pid {second}" in job.errors()
    assert "    | last words 1" in job.errors()


@ranks(1, init=False)
def test_the_first_of_several_failures_is_named(tmp_path):
    """The guard is stopped while ranks 1, then 0, fail: it finds both dead and still knows who was first."""
    box = Mailbox(tmp_path)
    script(tmp_path, "tell(f'{rank} {os.getpid()} {os.getppid()}')\nwait_forever()")
    with Launched(local(3, "script.py"), tmp_path) as job:
        told = [list(map(int, line.split())) for line in box.lines(3)]
        guard = told[0][2]
        os.kill(guard, signal.SIGSTOP)
        wait_for(
            lambda: Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[0] == "T", "a stopped guard"
        )
        for rank, number in ((1, signal.SIGKILL), (0, signal.SIGSEGV)):
            watched = os.pidfd_open(told[rank][1])
            os.kill(told[rank][1], number)
            assert gone(watched)
            os.close(watched)
        os.kill(guard, signal.SIGCONT)
        assert job.wait() == 137
    assert "rank 1 failed first" in job.errors()
    assert "then, before it was told to stop, rank 0 was killed by SIGSEGV (signal 11)" in job.errors()
    assert "stopped because of this: rank 2" in job.errors()


@pytest.mark.slow
@ranks(1, init=False)
def test_a_rank_that_ignores_being_asked_is_killed(tmp_path):
    box = Mailbox(tmp_path)
    text = "if rank: tell(0), os._exit(6)\nsignal.signal(15, signal.SIG_IGN)\ntell(os.getpid())\nwait_forever()"
    script(tmp_path, "if rank: open('go').read()\n" + text)
    os.mkfifo(tmp_path / "go")
    with Launched(local(2, "script.py"), tmp_path) as job:
        (stubborn,) = box.numbers(1)
        (tmp_path / "go").write_text("")
        assert job.wait() == 6
        assert not alive(stubborn)
    assert "killing rank 0" in job.errors()


# ---- signals


@ranks(1, init=False)
def test_ranks_may_end_well_after_a_signal(tmp_path):
    box = Mailbox(tmp_path)
    text = """
def save(*_):
    tell(f"saved {rank}")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda *_: tell(f"usr1 {rank}"))
tell("up")
while True: signal.pause()
"""
    script(tmp_path, text)
    with Launched(local(2, "script.py"), tmp_path) as job:
        box.lines(2)
        job.send(signal.SIGUSR1)
        assert box.lines(2) == ["usr1 0", "usr1 1"]
        job.send(signal.SIGTERM)
        assert box.lines(2) == ["saved 0", "saved 1"]
        assert job.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@ranks(1, init=False)
def test_a_signal_to_the_launcher_reaches_the_ranks(tmp_path, number):
    box = Mailbox(tmp_path)
    script(tmp_path, "tell(os.getpid())\nwait_forever()")
    with Launched(local(2, "script.py"), tmp_path) as job:
        pids = box.numbers(2)
        job.send(number)
        assert job.wait() == 128 + number
        assert not any(map(alive, pids))
    assert f"the job was stopped by {number.name}" in job.errors()
    assert "failed first" not in job.errors()
    assert ("KeyboardInterrupt" in job.errors()) == (number == signal.SIGINT)


@ranks(1, init=False)
def test_a_second_interrupt_kills_at_once(tmp_path):
    box = Mailbox(tmp_path)
    script(tmp_path, "signal.signal(2, lambda *_: tell('no'))\ntell(os.getpid())\nwhile True: signal.pause()")
    with Launched(local(1, "script.py"), tmp_path) as job:
        (pid,) = box.numbers(1)
        job.send(signal.SIGINT)
        assert box.lines(1) == ["no"]
        job.send(signal.SIGINT)
        assert job.wait() == 130
        assert not alive(pid)
    assert "killing" not in job.errors(), "the grace of a first signal did not run out"


@ranks(1, init=False)
def test_a_pause_reaches_the_ranks(tmp_path):
    """The kernel does not stop this launcher, whose session no shell watches; its ranks stop and go on at once."""
    box = Mailbox(tmp_path)
    script(tmp_path, "signal.signal(signal.SIGCONT, lambda *_: tell('on'))\ntell('up')\nwhile True: signal.pause()")
    with Launched(local(2, "script.py"), tmp_path) as job:
        box.lines(2)
        job.send(signal.SIGTSTP)
        assert box.lines(2) == ["on", "on"]
        job.send(signal.SIGTERM)
        assert job.wait() == 143


@ranks(1, init=False)
def test_a_shell_script_and_its_child_both_get_the_signal(tmp_path):
    box = Mailbox(tmp_path)
    script(tmp_path, "tell(os.getpid())\nwait_forever()")
    program = tmp_path / "run.sh"
    program.write_text(f"#!/bin/sh\n{sys.executable} script.py\nexit 0\n")
    program.chmod(0o755)
    with Launched(local(1, "--no_python", "./run.sh"), tmp_path) as job:
        (pid,) = box.numbers(1)
        job.send(signal.SIGINT)
        assert job.wait() in (0, 130)  # shells differ in what they make of it
        assert not alive(pid)


# ---- nothing is left


@pytest.mark.parametrize("victim", ["launcher", "guard"])
@ranks(1, init=False)
def test_nothing_outlives_a_killed_launcher(tmp_path, victim):
    box = Mailbox(tmp_path)
    script(tmp_path, FAMILY + "if rank == 0: tell(f'-{os.getppid()}')\nwait_forever()")
    with Launched(local(2, "--save_pid=1", "script.py"), tmp_path, environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as job:
        numbers = box.numbers(7)
        guard, family = -min(numbers), [number for number in numbers if number > 0]
        watched = [os.pidfd_open(pid) for pid in [*family, guard]]
        os.kill(job.pid if victim == "launcher" else guard, signal.SIGKILL)
        assert all(map(gone, watched))
        assert job.wait() == (-signal.SIGKILL if victim == "launcher" else 137)
        assert list((tmp_path / "deepspeed").iterdir()) == []


@ranks(1, init=False)
def test_a_failure_takes_children_and_daemons_along(tmp_path):
    box = Mailbox(tmp_path)
    script(tmp_path, FAMILY + "if rank == 0: open('go').read(), sys.exit(4)\nwait_forever()")
    os.mkfifo(tmp_path / "go")
    with Launched(local(2, "script.py"), tmp_path) as job:
        family = box.numbers(6)
        (tmp_path / "go").write_text("")
        assert job.wait() == 4
        assert not any(map(alive, family))


@pytest.mark.slow
@ranks(1, init=False)
def test_what_successful_ranks_leave_behind_is_ended(tmp_path):
    box = Mailbox(tmp_path)
    script(tmp_path, FAMILY)
    with Launched(local(1, "script.py"), tmp_path) as job:
        family = box.numbers(3)
        assert job.wait() == 0
        assert not any(map(alive, family))
    assert "left processes behind" in job.errors()


@ranks(1, init=False)
def test_a_rank_that_cannot_be_started_ends_the_others(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with Launched(local(2, "--no_python", "./program"), tmp_path) as job:
        assert job.wait() == 127
    assert "rank 0 could not be started" in job.errors()


# ---- with a real interpreter


@pytest.mark.slow
def test_the_command_as_users_type_it(tmp_path):
    (tmp_path / "fail.py").write_text(
        "import os, sys\nprint('rank', os.environ['RANK'])\nsys.exit(int(os.environ['RANK']) * 5)"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_SIZE")}
    environ |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "fail.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "rank 1 failed first: it exited with code 5" in done.stderr
    assert "rank 1\n" in done.stdout


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
