"""The Python that has torch loaded: scripts see what they would see otherwise, and end as they would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.distributed.launcher.launched import Mailbox, gone, script
from tests.harness import ranks
from tests.hosts import Hosts, need
from tests.warm_python import Warm

TIMEOUT = 250.0  # only ever reached by a test that fails


def start(python, folder, *words):
    environ = {**os.environ, "GIVEN": "a b"}
    return subprocess.Popen(
        [python.path, *words], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@ranks(1, init=False)
def test_what_a_script_sees_and_how_it_ends(tmp_path):
    text = """
import atexit
loaded = "torch" in sys.modules
print(sys.argv[1:], os.environ["GIVEN"], os.getcwd(), __name__, loaded, sys.path[0])
atexit.register(print, "the end")
how = sys.argv[1]
if how == "raises": raise ValueError("no")
if how == "says": sys.exit("words")
if how == "dies": os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""
    path = script(tmp_path, text)
    with Warm() as python:
        for how, status in (("0", 0), ("7", 7), ("raises", 1), ("says", 1), ("dies", -signal.SIGKILL)):
            job = start(python, tmp_path, "-u", str(path), how)
            out, errors = job.communicate(timeout=TIMEOUT)
            assert job.returncode == status, errors
            lines = out.decode().splitlines()
            assert lines[0] == f"['{how}'] a b {tmp_path} __main__ True {tmp_path}"
            assert lines[1:] == ([] if how == "dies" else ["the end"])
            assert (b"ValueError: no" in errors) == (how == "raises")
        job = start(python, tmp_path, "-u", "-m", path.stem, "5")
        assert job.communicate(timeout=TIMEOUT)[0].decode().startswith(f"['5'] a b {tmp_path} __main__ True {tmp_path}")
        assert job.returncode == 5
        job = start(python, tmp_path, "-c", "import sys; print(sys.executable, 'torch' in sys.modules)")
        assert job.communicate(timeout=TIMEOUT)[0].decode() == f"{sys.executable} False\n"


@ranks(1, init=False)
def test_what_a_script_starts_is_warm_and_on_the_same_host(tmp_path):
    need()
    text = """
import socket
print(socket.gethostname(), sorted(name for _, name in socket.if_nameindex()), "torch" in sys.modules, flush=True)
if len(sys.argv) == 1:
    sys.exit(subprocess.run([sys.executable, "-u", __file__, "again"]).returncode)
"""
    path = script(tmp_path, text)
    with Warm() as python, Hosts(tmp_path, count=1) as hosts:
        job = hosts[0].start(python.path, "-u", str(path), stdout=subprocess.PIPE)
        lines = job.communicate(timeout=TIMEOUT)[0].decode().splitlines()
    assert job.returncode == 0
    assert lines == ["node1 ['eth0', 'lo'] True"] * 2


@ranks(1, init=False)
def test_signals_reach_a_script_and_none_is_left(tmp_path):
    box = Mailbox(tmp_path)
    text = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\ntell(os.getpid())\nwait_forever()"
    words = "-u", str(script(tmp_path, text))
    with Warm() as python:
        asked, killed = start(python, tmp_path, *words), start(python, tmp_path, *words)
        watched = [os.pidfd_open(pid) for pid in box.numbers(2)]
        asked.send_signal(signal.SIGTERM)
        assert asked.wait(TIMEOUT) == 3
        killed.kill()
        assert all(map(gone, watched))
        left = start(python, tmp_path, *words)
        watched = [os.pidfd_open(pid) for pid in box.numbers(1)]
    assert all(map(gone, watched))
    left.kill()
    left.wait(TIMEOUT)
