"""What every test may rely on: a quiet logger, examples without a deadline, and no world that another test left."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist

from deepspeed.log import logger

with contextlib.suppress(ImportError):  # a machine that only runs the tests of its GPU may not have it
    from hypothesis import HealthCheck, settings

    # A busy machine is slow, not wrong.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


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
