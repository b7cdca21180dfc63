"""Elastic jobs on one node: ranks die, the job goes on from its checkpoint, and ends as any other does."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from deepspeed.launcher import runner
from tests.distributed.elasticity.elastic_job import SAVED, STEPS, ElasticJob, assert_continues, reference
from tests.distributed.launcher.launched import Launched, Mailbox, fails, gone, local, script
from tests.harness import ranks
from tests.warm_python import Warm

ELASTIC = "--enable_elastic_training"
PATIENCE = 200.0  # seconds, only ever reached by a test that fails


def elastic(count, *words):
    return local(count, ELASTIC, *words)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@ranks(1, init=False, timeout=500)
def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path, stage):
    config = {"zero_optimization": {"stage": stage}}
    (tmp_path / "plain").mkdir()
    wanted = reference(tmp_path / "plain", config)
    job = ElasticJob(tmp_path, config)
    words = ["--num_gpus=2", "--elastic_training", *job.words({"5": 1, "8": 0})]
    with Warm() as python, Launched(words, tmp_path, main=runner.main, python=python) as run:
        assert run.wait(PATIENCE) == 0, run.errors()
    lives = job.lives()
    assert [(life.world, life.begin) for life in lives] == [(2, 0), (2, SAVED), (2, 2 * SAVED)]
    assert_continues(lives, wanted)
    assert sorted(lives[-1].steps) == list(range(2 * SAVED + 1, STEPS + 1))
    assert "rank 1 failed first: it was killed by SIGKILL (signal 9)" in run.errors()
    assert "restart 2 of 100" in run.errors()


@pytest.mark.slow
@ranks(1, init=False)
def test_the_limit_of_restarts_ends_the_job_with_the_code_of_the_rank(tmp_path):
    box, _turn = Mailbox(tmp_path), Mailbox(tmp_path, "turn")
    script(tmp_path, fails("os.environ['TORCHELASTIC_RESTART_COUNT']", 5))
    with Launched(elastic(2, "--max_elastic_restarts=2", "script.py"), tmp_path) as job:
        assert box.lines(6) == ["0", "0", "1", "1", "2", "2"]
        assert job.wait() == 5
    assert "the limit of 2 restarts is reached" in job.errors()
    assert job.errors().count("rank 1 failed first: it exited with code 5") == 3


@pytest.mark.slow
@ranks(1, init=False)
def test_without_restarts_the_first_failure_is_the_last(tmp_path):
    script(tmp_path, "sys.exit(3)")
    with Launched(elastic(1, "--max_elastic_restarts=0", "script.py"), tmp_path) as job:
        assert job.wait() == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@ranks(1, init=False)
def test_a_signal_ends_the_job_for_good(tmp_path, number):
    box = Mailbox(tmp_path)
    script(tmp_path, "tell(os.getpid())\nwait_forever()")
    with Launched(elastic(2, "script.py"), tmp_path) as job:
        watched = [os.pidfd_open(pid) for pid in box.numbers(2)]
        job.send(number)
        assert job.wait() == 128 + number
        assert all(gone(each) for each in watched)
    assert "restart" not in job.errors()


@pytest.mark.slow
@ranks(1, init=False)
def test_ranks_that_end_well_after_a_signal_make_a_job_that_ended_well(tmp_path):
    box = Mailbox(tmp_path)
    text = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntell('up')\nwait_forever()"
    script(tmp_path, text)
    with Launched(elastic(2, "script.py"), tmp_path) as job:
        box.lines(2)
        job.send(signal.SIGTERM)
        assert job.wait() == 0


@pytest.mark.slow
@ranks(1, init=False)
def test_a_killed_launcher_leaves_nothing_behind(tmp_path):
    box = Mailbox(tmp_path)
    script(tmp_path, "tell(os.getpid())\nwait_forever()")
    with Launched(elastic(2, "script.py"), tmp_path) as job:
        watched = [os.pidfd_open(pid) for pid in box.numbers(2)]
        job.send(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert all(gone(each) for each in watched)


@pytest.mark.slow
@ranks(1, init=False)
def test_only_as_many_ranks_as_the_elastic_batch_runs_on(tmp_path):
    """A batch of 8 in micro batches of 2 does not run on 3 ranks: two train, the third slot waits."""
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.1}
    (tmp_path / "config.json").write_text(json.dumps({"elasticity": section}))
    box = Mailbox(tmp_path)
    script(
        tmp_path,
        "tell(os.environ['WORLD_SIZE'] + os.environ['LOCAL_SIZE'] + os.environ['DEEPSPEED_ELASTICITY_CONFIG'])",
    )
    with Launched(elastic(3, "script.py", "--deepspeed_config", "config.json"), tmp_path) as job:
        told = box.lines(2)
        assert job.wait() == 0
    assert [each[:2] for each in told] == ["22", "22"]
    assert json.loads(told[0][2:])["max_train_batch_size"] == 8
    assert "2 of 3 ranks are used" in job.errors()


@pytest.mark.slow
@ranks(1, init=False)
def test_each_life_has_its_own_log_files(tmp_path):
    script(tmp_path, "print('life', os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(1)")
    words = ["--max_elastic_restarts=1", "--enable_each_rank_log=logs", "script.py"]
    with Launched(elastic(1, *words), tmp_path) as job:
        assert job.wait() == 1
    text = "".join(path.read_text() for path in sorted(Path(tmp_path, "logs").iterdir()))
    assert text == "life 0\nlife 1\n"
