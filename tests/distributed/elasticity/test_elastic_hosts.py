"""An elastic job on several hosts, real ssh between network namespaces: hosts lose power while it trains."""

from __future__ import annotations

import pytest

from deepspeed.launcher import runner
from tests.distributed.elasticity.elastic_job import ElasticJob, assert_continues, in_order, reference
from tests.distributed.launcher.launched import Launched
from tests.harness import ranks
from tests.hosts import Hosts, need, wait_for
from tests.warm_python import Warm

PATIENCE = 240.0  # seconds, only ever reached by a test that fails


@pytest.mark.slow
@ranks(1, init=False, timeout=600)
def test_a_host_loses_power_and_comes_back_while_the_job_trains(tmp_path):
    """Also the first host may be lost: the launcher keeps the store at which the hosts meet."""
    need()
    (tmp_path / "plain").mkdir()
    wanted = reference(tmp_path / "plain")
    job = ElasticJob(tmp_path)
    first, second = job.hold(4), job.hold(8)
    with Warm() as python, Hosts(tmp_path) as hosts:
        words = [f"--hostfile={hosts.hostfile(1, 2)}", "--elastic_training", *job.words()]
        given = {"main": runner.main, "environ": hosts.environment(), "python": python}
        with Launched(words, tmp_path, **given) as run:
            wait_for(lambda: job.reached(4, 3), "the life of both hosts")
            hosts.power_off(hosts[0])
            first.unlink()
            wait_for(lambda: job.reached(8, 2), "the life of the second host")
            hosts.power_on(hosts[0])
            wait_for(lambda: job.reached(8, 3), "the life of both hosts again")
            second.unlink()
            assert run.wait(PATIENCE) == 0, run.errors()
        assert hosts.left() == []
    lives = job.lives()
    assert in_order([life.world for life in lives], [3, 2, 3]), run.errors()
    assert_continues(lives, wanted)
    assert "host node1 is lost" in run.errors()
