"""How many checkpoints stay: the newest N whole ones, and whatever is not certainly one of ours."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from deepspeed.checkpoint.storage.commit import LATEST, LATEST_UNIVERSAL, remove
from deepspeed.checkpoint.storage.locate import Checkpoint, read_latest, scan

__all__ = ["expired", "retain"]


def expired(checkpoints: Sequence[Checkpoint], keep_last: int, spared: Sequence[str | None]) -> list[Checkpoint]:
    """Those to remove, oldest first; `checkpoints` are newest first.

    A checkpoint goes only if it has a manifest, so that we know it for ours, no `latest` names it, it is no link, and
    at least `keep_last` good ones are newer. Damaged ones, and ones that say they were saved in the future, do not
    count as kept: they never displace a good one.
    """
    good, now = 0, time.time()
    result = []
    for checkpoint in checkpoints:
        if checkpoint.is_ahead(now):
            continue
        known = checkpoint.manifest is not None and not checkpoint.path.is_symlink()
        if good >= keep_last and known and checkpoint.tag not in spared:
            result.append(checkpoint)
        good += checkpoint.good
    return result[::-1]


def retain(save_dir: str | os.PathLike[str], keep_last: int, token: str, latest: str = LATEST) -> list[Path]:
    """Remove the expired checkpoints of a directory; returns where they were."""
    names = {latest, LATEST, LATEST_UNIVERSAL}
    spared = [read_latest(save_dir, name) for name in names]
    gone = expired(scan(save_dir), max(keep_last, 1), spared)
    for number, checkpoint in enumerate(gone):
        if checkpoint.manifest is not None:
            remove(checkpoint.path, checkpoint.manifest, f"{token}{number}")
    return [checkpoint.path for checkpoint in gone]
