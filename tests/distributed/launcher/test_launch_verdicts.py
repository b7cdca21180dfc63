"""The last words of a launcher name the rank at fault, also where another one failed because it waited in vain."""

from __future__ import annotations

import re

import pytest

from tests.distributed.launcher.launched import Launched, local, script
from tests.harness import ranks
from tests.warm_python import Warm

JOB = """
from pathlib import Path
import torch
import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch import HangSettings

deepspeed.init_distributed()
dist.barrier()
while not dist.dispatcher.watch.neighbours:  # each rank can look at the other
    time.sleep(0.01)
dist.barrier()
dist.watch_hangs(HangSettings(timeout=2, patience=50, folder=Path.cwd()))
if rank == {culprit}:
    {fault}
dist.all_reduce(torch.ones(8))
"""


def ended(tmp_path, culprit, fault):
    """Exit status of such a job, what its ranks said, and the launcher's last words."""
    script(tmp_path, JOB.format(culprit=culprit, fault=fault))
    with Warm() as python, Launched(local(2, "script.py"), tmp_path, python=python) as job:
        status = job.wait()
    said, _, last = job.errors().rpartition("[ERROR] [deepspeed] ")
    return status, said, last


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
@ranks(1, init=False)
def test_a_rank_that_hangs(tmp_path, culprit):
    status, said, last = ended(tmp_path, culprit, "wait_forever()")
    assert status == 1
    assert last.startswith(f"the job failed because rank {culprit} never entered all_reduce 3 on group world; ")
    assert "script.py:" in last.splitlines()[0]
    assert f"local rank {culprit}, pid " in last
    assert f"noticed: by rank {1 - culprit}, which exited with code 1 after " in last
    assert last.rstrip().endswith(f"stopped because of this: rank {culprit}")
    assert "is stuck" not in said
    # The error is printed once, and of the traceback the user's lines.
    assert (said + last).count("CommError") == 1
    assert "`dist.all_reduce(torch.ones(8))`" not in said
    assert "dist.all_reduce(torch.ones(8))" in said
    assert not re.search(r'File ".*/deepspeed/comm/', said)


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
@ranks(1, init=False)
def test_a_rank_that_ends_early(tmp_path, culprit):
    status, _, last = ended(tmp_path, culprit, "sys.exit(0)")
    assert status == 1
    assert last.startswith(f"the job failed because rank {culprit} has finished its program")
    assert f"  ended:   rank {culprit} exited with code 0 after " in last
    assert f"noticed: by rank {1 - culprit}, which exited with code 1 after " in last
    assert "deepspeed-hang-" not in last, "there are no stacks of a rank that has ended"


@pytest.mark.slow
@ranks(1, init=False)
def test_a_rank_that_raises(tmp_path):
    """Which of the ranks ends first is chance; which is named is not."""
    status, said, last = ended(tmp_path, 1, "raise ValueError('sample 17 has no label')")
    assert status == 1
    assert re.match(r"rank 1 failed first|the job failed because rank 1 ended with ValueError", last)
    assert "    | [rank1]: ValueError: sample 17 has no label" in last
    assert "Traceback" not in last
    assert "[rank1]: ValueError: sample 17 has no label" in said
