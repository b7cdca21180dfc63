"""Elastic jobs of several nodes, here launchers side by side on this machine: nodes are killed, and others join."""

from __future__ import annotations

import os
import signal

import pytest

from deepspeed.launcher import runner
from deepspeed.launcher.ports import free_port
from tests.distributed.elasticity.elastic_job import ElasticJob, assert_continues, hurried, in_order, reference
from tests.distributed.launcher.launched import Launched, Mailbox, fails, gone, script
from tests.harness import ranks
from tests.hosts import wait_for
from tests.warm_python import Warm

PATIENCE = 200.0  # seconds, only ever reached by a test that fails


class Nodes:
    """Launchers that find each other at one port, as `--no_ssh` starts them; the first keeps the store."""

    def __init__(self, folder, slots, python=None):
        self.folder, self.port, self.python = folder, free_port(), python
        (folder / "hosts").write_text("".join(f"node{at} slots={count}\n" for at, count in enumerate(slots)))

    def start(self, number, words, *options):
        """The launcher of a node; further ones of the same node get folders of their own for their output."""
        own = self.folder / f"node{number}"
        while own.exists():
            own = own.with_name(own.name + "_again")
        own.mkdir()
        given = [f"--hostfile={self.folder}/hosts", "--no_ssh", f"--node_rank={number}", "--master_addr=127.0.0.1"]
        given += [f"--master_port={self.port}", "--elastic_training", *options, *words]
        return Launched(given, own, main=runner.main, python=self.python)


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_nodes_die_and_join_and_the_curve_continues(tmp_path):
    (tmp_path / "plain").mkdir()
    wanted = reference(tmp_path / "plain")
    job = ElasticJob(tmp_path)
    with Warm() as python, hurried():
        join_and_die(job, Nodes(tmp_path, (1, 2), python))
    lives = job.lives()
    assert in_order([life.world for life in lives], [3, 1, 3])
    assert_continues(lives, wanted)


def join_and_die(job, nodes):
    first, second = job.hold(4), job.hold(8)
    with nodes.start(0, job.words()) as one:
        with nodes.start(1, job.words()) as two:
            wait_for(lambda: job.reached(4, 3), "the first life")
            two.send(signal.SIGKILL)
            two.wait()
        first.unlink()
        wait_for(lambda: job.reached(8, 1), "the life of one node")
        with nodes.start(1, job.words()) as again:
            wait_for(lambda: job.reached(8, 3), "the life of both again")
            second.unlink()
            assert one.wait(PATIENCE) == 0, one.errors()
            assert again.wait(PATIENCE) == 0, again.errors()


@pytest.mark.slow
@ranks(1, init=False, timeout=500)
def test_the_limit_of_one_node_ends_all_with_its_code(tmp_path):
    box, _turn = Mailbox(tmp_path), Mailbox(tmp_path, "turn")
    path = script(tmp_path, fails("rank", 7))
    nodes = Nodes(tmp_path, (1, 1))
    with hurried():
        launched = [nodes.start(at, [path], "--max_elastic_restarts=1", "--min_elastic_nodes=2") for at in (0, 1)]
    with launched[0] as one, launched[1] as two:
        box.lines(4)
        assert {one.wait(PATIENCE), two.wait(PATIENCE)} == {7}
    assert "the limit of 1 restarts is reached" in one.errors() + two.errors()


@pytest.mark.slow
@ranks(1, init=False, timeout=500)
def test_a_node_that_waits_for_others_can_be_stopped(tmp_path):
    path = script(tmp_path, "tell('never')")
    nodes = Nodes(tmp_path, (1, 1))
    with nodes.start(0, [path], "--min_elastic_nodes=2") as job:
        wait_for(lambda: "2 to 2 hosts meet at" in job.errors(), "the launcher")
        job.send(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
    assert "the job was stopped by SIGTERM" in job.errors()
    assert "Traceback" not in job.errors()


@pytest.mark.slow
@ranks(1, init=False, timeout=500)
def test_a_node_that_is_stopped_leaves_the_others_to_go_on(tmp_path):
    box = Mailbox(tmp_path)
    # One that begins alone waits for the other, too: only after they were two is one enough.
    text = """
world, both = os.environ["WORLD_SIZE"], os.path.dirname(__file__) + "/both"
if world == "2": open(both, "w").close()
tell(world)
if world == "2" or not os.path.exists(both): wait_forever()
"""
    path = script(tmp_path, text)
    nodes = Nodes(tmp_path, (1, 1))
    with hurried():
        launched = [nodes.start(at, [path], *(["--min_elastic_nodes=1"])) for at in (0, 1)]
    with launched[0] as one, launched[1] as two:
        while box.lines(1) != ["2"]:  # a node has begun alone
            pass
        box.lines(1)
        two.send(signal.SIGTERM)
        assert two.wait(PATIENCE) == 128 + signal.SIGTERM
        assert box.lines(1) == ["1"]
        assert one.wait(PATIENCE) == 0


@pytest.mark.slow
@ranks(1, init=False, timeout=500)
def test_when_the_node_that_keeps_the_store_is_gone_the_others_end(tmp_path):
    box = Mailbox(tmp_path)
    path = script(tmp_path, "tell(os.getpid())\nwait_forever()")
    nodes = Nodes(tmp_path, (1, 1))
    with hurried():
        launched = [nodes.start(at, [path], "--min_elastic_nodes=2") for at in (0, 1)]
    with launched[0] as one, launched[1] as two:
        watched = [os.pidfd_open(pid) for pid in box.numbers(2)]
        one.send(signal.SIGKILL)
        assert two.wait(PATIENCE) == 1
        assert all(gone(each) for each in watched)
    assert "do not meet any more" in two.errors()
