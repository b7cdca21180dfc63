"""What every test may rely on: the library's logger is as quiet as it was before."""

from __future__ import annotations

import pytest

from deepspeed.utils.logging import logger


@pytest.fixture(autouse=True)
def _logger_level():
    level = logger.level
    yield
    logger.setLevel(level)
