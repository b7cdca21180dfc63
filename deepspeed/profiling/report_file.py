"""Where the report of a profiled step goes: a file of the config, or standard output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deepspeed.log import logger

__all__ = ["to_file_or_output", "write_report"]


def write_report(text: str, output_file: str) -> None:
    """Write a file, in a folder that is made if it has to be."""
    target = Path(output_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def to_file_or_output(key: str, output_file: str | None, show: Callable[[str | None], None]) -> None:
    """show(file), or show(None) where there is none or it cannot be written: a job does not end for its report."""
    try:
        show(output_file)
    except OSError as error:
        if output_file is None:
            raise
        logger.warning("%s: %r cannot be written (%s); the report goes to standard output", key, output_file, error)
        show(None)
