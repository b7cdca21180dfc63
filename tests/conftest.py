"""What every test may rely on: the library's logger is as quiet as it was before, and no example has a deadline."""

from __future__ import annotations

import contextlib

import pytest

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
