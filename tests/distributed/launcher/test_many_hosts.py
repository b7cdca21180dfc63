"""Jobs on several hosts with every launcher: real ssh, pdsh, mpirun and srun between network namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deepspeed.launcher import ds_ssh, report, runner, supervise
from tests.distributed.launcher.launched import Launched
from tests.harness import ROOT, ranks
from tests.hosts import Hosts, need, wait_for
from tests.slurm import PROGRAMS, Slurm
from tests.warm_python import Warm

EXAMPLE = ROOT / "examples" / "hosts" / "train.py"
LOSS = "loss 1.6831 after 20 steps"  # of the example on one rank
PATIENCE = 200.0  # seconds, only ever reached by a test that fails
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
NEEDED = {
    "ssh": (),
    "pdsh": ("pdsh",),
    "openmpi": ("mpirun.openmpi",),
    "mpich": ("mpirun.mpich",),
    "slurm": PROGRAMS,
}
TORTURE = {
    "PLAIN": "value",
    "SPACES": "a b  c",
    "QUOTES": "\"double\" 'single' it's",
    "EXPANDED": "`id` $(id) $HOME ${HOME} ~ * ? !x",
    "CONTROL": "; & | < > ( ) { } # \\ \\n",
    "SIGNS": "a,b=c;d %h %n %%",
    "EMPTY": "",
}
WORDS = ["a b", "it's", '"', "$HOME", "`id`", "%h %n", "", "é", "*", "\\", "a\nb"]


class Site:
    """Hosts with what a launcher needs; `launch` starts the `deepspeed` command with it."""

    def __init__(self, hosts, launcher, environment):
        self.hosts, self.launcher = hosts, launcher
        self.environment = {**hosts.environment(), **environment}

    def launch(self, slots, *words, python=None):
        """`python`: a `Warm` one for everything on the hosts, where the question is not how processes end."""
        # mpirun has to find the hosts by their addresses, since only our ssh knows their names.
        hostfile = self.hosts.hostfile(*slots, addresses=self.launcher in ("openmpi", "mpich"))
        given = {
            "mpich": [f"--launcher_args=-localhost {self.hosts.own}"],
            "slurm": [f"--master_addr={self.hosts[0].address}"],
        }.get(self.launcher, [])
        options = [f"--hostfile={hostfile}", f"--launcher={self.launcher}", *given]
        given = {"main": runner.main, "environ": self.environment, "python": python}
        return Launched([*options, *words], self.hosts.folder, **given)

    def script(self, text, name="script.py"):
        path = self.hosts.folder / name
        path.write_text(text)
        return str(path)


@contextmanager
def site(folder, launcher):
    need(*NEEDED[launcher])
    with Hosts(folder) as hosts:
        if launcher == "slurm":
            with Slurm(hosts) as slurm:
                yield Site(hosts, launcher, slurm.environment)
                assert hosts.left() == []
        else:
            yield Site(hosts, launcher, AS_ROOT if launcher == "openmpi" else {})
            assert hosts.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "slots"), [("ssh", (2, 1)), *((name, (1, 1)) for name in list(NEEDED)[1:])])
@ranks(1, init=False, timeout=600)
def test_the_example_trains_across_hosts(tmp_path, launcher, slots):
    """With ssh by interpreters as users have them, else by warm ones."""
    world = sum(slots)
    words = "--output=fold", EXAMPLE, "--backend=gloo"
    with ExitStack() as stack:
        python = None if launcher == "ssh" else stack.enter_context(Warm())
        here = stack.enter_context(site(tmp_path, launcher))
        job = stack.enter_context(here.launch(slots, *words, python=python))
        assert job.wait(PATIENCE) == 0, job.errors()
        lines = job.output().splitlines()
        rank = 0
        for host, count in enumerate(slots, 1):
            for local in range(count):
                assert f"[{rank}] rank {rank} of {world} is local rank {local} on node{host}" in lines
                rank += 1
        # Folded if they came at about the same time, which a busy machine may prevent.
        assert {line.partition("] ")[2] for line in lines if "loss" in line} == {LOSS}


PROBE = """
import json, os, signal, sys
with open({folder!r} + "/shown" + os.environ["RANK"], "w") as file:
    seen = {{name: os.environ.get(name) for name in {names!r}}}
    json.dump([sys.argv[1:], seen, os.getcwd(), os.environ["LOCAL_RANK"]], file)
if os.environ["RANK"] == "2":
    sys.exit(7)
while True:
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(NEEDED))
@ranks(1, init=False, timeout=600)
def test_everything_arrives_as_written_and_a_failing_rank_ends_the_job(tmp_path, launcher):
    with site(tmp_path, launcher) as here:
        script = here.script(PROBE.format(folder=str(tmp_path), names=[*TORTURE, "HF_TOKEN", "PYTHONPATH"]))
        lines = [f"{key}={value}" for key, value in TORTURE.items()]
        (tmp_path / ".deepspeed_env").write_text("\n".join([*lines, "HF_TOKEN=hf_abcdefghijkl", ""]))
        with here.launch((1, 2), "--no_local_rank", script, *WORDS) as job:
            assert job.wait(PATIENCE) == 7, job.errors()
        told = job.errors().split("rank 2 failed first: it exited with code 7")[1]
        assert "host node2, local rank 1, pid " in told.splitlines()[1]
        assert "hf_abc" not in job.errors()
    arguments, found, folder, local_rank = json.loads((tmp_path / "shown2").read_text())
    assert (arguments, folder, local_rank) == (WORDS, str(tmp_path), "1")
    assert found.pop("HF_TOKEN") == (None if launcher == "pdsh" else "hf_abcdefghijkl")
    assert str(ROOT) in found.pop("PYTHONPATH").split(":"), "ranks would not find the package"
    assert found == TORTURE


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ssh", "openmpi", "slurm"])
@ranks(1, init=False, timeout=600)
def test_preflight_looks_at_the_hosts_that_the_job_would_have(tmp_path, launcher):
    with Warm() as python, site(tmp_path, launcher) as here:
        script = here.script("raise SystemExit('the script ran')")
        with here.launch((1, 2), "--preflight", script, python=python) as job:
            assert job.wait(PATIENCE) == 0, job.output() + job.errors()
        assert "3 ranks on 2 hosts" in job.output()
        assert "READY" in job.output()
        assert "the script ran" not in job.output() + job.errors()


WAITING = """
import signal
print("up", flush=True)
while True:
    signal.pause()
"""


def up(job, count):
    wait_for(lambda: len(re.findall(r"\bup$", job.output(), re.MULTILINE)) == count, "the ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [*((name, signal.SIGKILL) for name in NEEDED), ("ssh", signal.SIGINT), ("pdsh", signal.SIGTERM)],
)
@ranks(1, init=False, timeout=600)
def test_a_signal_to_the_launcher_ends_every_process_on_every_host(tmp_path, launcher, number):
    with site(tmp_path, launcher) as here, here.launch((1, 1), here.script(WAITING)) as job:
        up(job, 2)
        job.send(number)
        assert job.wait(PATIENCE) == (-number if number == signal.SIGKILL else 128 + number), job.errors()


# ---- what only the built-in launcher can do, or has to


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_a_host_that_is_killed_or_cannot_be_reached(tmp_path):
    with site(tmp_path, "ssh") as here:
        script = here.script(WAITING)
        with here.launch((1, 1), script) as job:
            up(job, 2)
            for pid in here.hosts[1].processes():  # the launcher of that host, its guard and its rank
                os.kill(int(pid), signal.SIGKILL)
            assert job.wait(PATIENCE) in (137, 255), job.errors()
        assert "host node2: ssh " in job.errors()
        for name, told in (("closed", "Connection refused"), ("nowhere.invalid", "resolve")):
            (tmp_path / "hostfile2").write_text(f"node1 slots=1\n{name} slots=1\n")
            words = [f"--hostfile={tmp_path}/hostfile2", "--launcher=ssh", script]
            with Launched(words, tmp_path, main=runner.main, environ=here.environment) as job:
                assert job.wait(PATIENCE) == 255, job.errors()
            assert f"host {name}: ssh exited with code 255" in job.errors()
            assert told in job.errors()
            (tmp_path / "hostfile2").write_text(f"{name} slots=1\nnode1 slots=1\n")
            with Launched(words, tmp_path, main=runner.main, environ=here.environment) as job:
                assert job.wait(PATIENCE) == 2, "the first host is asked for its address"


GRACEFUL = """
import os, signal, sys, time
def end(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, lambda *_: print("told", flush=True))
print("up", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_ranks_hear_signals_and_may_end_well(tmp_path):
    with site(tmp_path, "ssh") as here, here.launch((1, 1), here.script(GRACEFUL)) as job:
        up(job, 2)
        job.send(signal.SIGUSR1)
        wait_for(lambda: job.output().count("told") == 2, "the signal")
        job.send(signal.SIGTERM)
        assert job.wait(PATIENCE) == 0, job.errors()
        assert job.output().count("saved") == 2


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_modules_programs_and_nothing_secret_in_the_list_of_processes(tmp_path):
    with site(tmp_path, "ssh") as here:
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "__main__.py").write_text(WAITING)
        (tmp_path / ".deepspeed_env").write_text("HF_TOKEN=hf_abcdefghijkl\n")
        with here.launch((1, 1), "--module", "package") as job:
            up(job, 2)
            seen = [_command_line(pid) for pid in os.listdir("/proc") if pid.isdigit()]
            assert any("--job_from_stdin" in line for line in seen)
            assert not any("hf_abc" in line for line in seen)
            job.send(signal.SIGKILL)
            job.wait(PATIENCE)
        assert here.hosts.left() == []
        program = tmp_path / "program.sh"
        program.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE: $*"\n')
        program.chmod(0o755)
        with here.launch((1, 1), "--no_python", "--no_local_rank", "./program.sh", "a b") as job:
            assert job.wait(PATIENCE) == 0, job.errors()
        assert {"[0] 0 of 2: a b", "[1] 1 of 2: a b"} <= set(job.output().splitlines())


def _command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def tool(here, main, *words):
    """Exit code and output of a tool that asks the hosts."""
    (here.hosts.folder / "out").write_text("")
    words = [f"--hostfile={here.hosts.hostfile(1, 1)}", *words]
    with Launched(words, here.hosts.folder, main=lambda given: sys.exit(main(given)), environ=here.environment) as job:
        return job.wait(PATIENCE), job.output(), job.errors()


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_tools_that_ask_all_hosts(tmp_path):
    with site(tmp_path, "ssh") as here:
        code, out, errors = tool(here, ds_ssh.main, "hostname; test $(hostname) = node2 || exit 3;", "echo '[1] $HOME'")
        assert code == 3, errors
        assert sorted(out.splitlines()) == ["node1: node1", "node2: [1] $HOME", "node2: node2"]
        assert "host node1: ssh exited with code 3" in errors
        code, out, errors = tool(here, report.main, "--json", "--hide_operator_status")
        assert code == 0, errors
        told = json.loads(out)
        assert list(told) == ["node1", "node2"]
        assert told["node1"]["interfaces"] != []
        assert report.differences(told) == {}


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_a_cut_network_is_noticed_by_the_far_end(tmp_path):
    """The far end hears nothing any more, and its ranks end without anybody telling them."""
    read, write = os.pipe()
    pipe, told = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        supervise.SILENCE, supervise._FAREWELL = 0.2, 0.1
        supervise._follow(read, lambda number: os.write(told, bytes([number])))
    os.write(write, bytes([signal.SIGUSR1, supervise.BEAT]))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert os.read(pipe, 100) == bytes([signal.SIGUSR1, signal.SIGTERM])
    assert time.monotonic() - started >= 0.3
