"""The files of `--enable_each_rank_log`: one for each rank, named by the time and the rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed.launcher.errors import LaunchError
from deepspeed.log import logger

__all__ = ["log_files"]


def log_files(folder: str, ranks: Sequence[int]) -> Mapping[int, str]:
    """Rank → the file for its output; empty if it is not asked for."""
    if folder == "None":
        return {}
    path = Path(folder).resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--enable_each_rank_log {folder}: the folder cannot be made: {error}") from error
    stamp = time.strftime("%Y%m%d%H%M%S")
    logger.info("the output of each rank is in %s", path / f"{stamp}_rank*.log")
    return {rank: str(path / f"{stamp}_rank{rank}.log") for rank in ranks}
