"""What the library logs on this rank, as a list of lines."""

from __future__ import annotations

import logging

from deepspeed.log import logger, warn_once


class Told(logging.Handler):
    """What the library logs meanwhile on this rank, from warnings on if nothing else is asked for."""

    def __init__(self, level=logging.WARNING):
        super().__init__(level)
        self.lines = []
        warn_once.cache_clear()

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logger.addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logger.removeHandler(self)
