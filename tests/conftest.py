"""What every test may rely on: a quiet logger, the same draws, no deadlines, and no world that another test left."""

from __future__ import annotations

import contextlib
import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist

from deepspeed.log import logger

pytest_plugins = ("tests.sampling", "tests.costs", "tests.kernel_compilation")

# Read when Triton is imported. Without a device kernels are interpreted; with one they never are by default, because an
# interpreted kernel that gets memory of the device ends the process.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

with contextlib.suppress(ImportError):  # a machine that only runs the tests of its GPU may not have it
    from hypothesis import HealthCheck, settings

    # A busy machine is slow, not wrong.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def pytest_configure():
    """Processes of one run share the cores: more threads than cores only wait for each other."""
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // beside))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell that runs this in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all files are imported, of which nothing is garbage


def pytest_collection_finish():
    """What is there now stays to the end: no collection in a test looks through it again."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Some libraries complain of what is never collected."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _same_draws():
    """Whatever ran before, and in whichever process: a test that fails does so again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _logger_level():
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _no_world_is_left():
    """A test that makes a world ends it; else every later test of this process would be in it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left a process group behind")
