"""The norm that nobody asks for: complete before the next one, and before the process ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from deepspeed.comm import Pending
from deepspeed.errors import CommError
from deepspeed.log import logger
from deepspeed.zero.states.norm import PendingNorm


class Work:
    """A reduction that counts who waits for it, and may fail."""

    def __init__(self, error=None):
        self.waits, self.error = 0, error

    def wait(self, timeout=None):
        self.waits += 1
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.waits > 0


def begun(work):
    norms = PendingNorm()
    norms.begun(Pending(torch.tensor(3.0), work))
    return norms


@pytest.fixture
def warned(monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
    return said


def test_it_is_waited_for_once_by_whoever_comes_first():
    work = Work()
    norms = begun(work)
    assert work.waits == 0
    norms.complete()
    norms.complete()
    assert float(norms.last.wait()) == 3
    assert work.waits == 1
    norms.close()
    assert norms.last is None


def test_a_failure_is_told_to_the_next_step_and_logged_at_the_end(warned):
    norms = begun(Work(CommError("rank 1 is gone")))
    with pytest.raises(CommError, match="rank 1 is gone"):
        norms.complete()
    norms.close()
    assert warned == ["the norm of the last step's gradients was not found: rank 1 is gone"]
    norms.close()
    assert len(warned) == 1


def test_who_lets_go_of_it_completes_it():
    work = Work()
    norms = begun(work)
    del norms
    gc.collect()
    assert work.waits == 1


def test_a_fork_does_not_wait_for_what_it_has_not_begun():
    work = Work()
    norms = begun(work)
    child = os.fork()
    if child == 0:
        norms.close()
        os._exit(work.waits)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    norms.close()
    assert work.waits == 1


def test_a_process_completes_it_before_it_ends():
    script = (
        "from tests.unit.zero.test_unasked import Work, begun\n"
        "work = Work()\n"
        "work.wait = lambda timeout: print('waited at most', timeout)\n"
        "norms = begun(work)\n"
        "print('the script is over')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert ran.stdout.splitlines() == ["the script is over", "waited at most 0:00:10"]
