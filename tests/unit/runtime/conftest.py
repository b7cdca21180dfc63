"""What several files of this folder look at."""

from __future__ import annotations

import logging

import pytest

from deepspeed.log import logger


@pytest.fixture
def warnings_logged():
    """Texts of the package's warnings."""
    texts = []

    class Keep(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)
