"""A rank that fails at a random moment: the exit code is its own, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest

from deepspeed.launcher import runner
from tests.distributed.launcher.launched import Launched
from tests.distributed.launcher.random_failures import MARK, Trial, alive
from tests.harness import ranks


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5])
@ranks(1, init=False)
def test_a_rank_fails_at_a_random_moment(tmp_path, seed):
    trial, mark = Trial.of(seed), uuid.uuid4().hex
    words = ["--num_gpus", trial.world, trial.write(tmp_path)]
    with Launched(words, tmp_path, main=runner.main, environ={MARK: mark}) as job:
        assert job.wait(120) == trial.expected, job.errors()
        assert alive(mark) == []
        assert f"rank {trial.rank} failed first" in job.errors()


def test_what_is_left_would_be_found():
    mark = uuid.uuid4().hex
    with subprocess.Popen([sys.executable, "-c", "input()"], env={MARK: mark}, stdin=subprocess.PIPE) as child:
        assert len(alive(mark)) == 1
        child.communicate(b"\n")
    assert alive(mark) == []
