"""How many checkpoints stay: the newest N whole ones, and whatever is not certainly one of ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from deepspeed.checkpoint.storage.commit import LATEST, remove
from deepspeed.checkpoint.storage.locate import Checkpoint, read_latest, scan

__all__ = ["expired", "retain"]


def expired(checkpoints: Sequence[Checkpoint], keep_last: int, spared: Sequence[str | None]) -> list[Checkpoint]:
    """Those to remove, oldest first; `checkpoints` are newest first.

    A checkpoint goes only if it has a manifest, so that we know it for ours, no `latest` names it, and at least
    `keep_last` good ones are newer. Damaged ones do not count as kept: they never displace a good one.
    """
    good = 0
    result = []
    for checkpoint in checkpoints:
        if good >= keep_last and checkpoint.manifest is not None and checkpoint.tag not in spared:
            result.append(checkpoint)
        good += checkpoint.good
    return result[::-1]


def retain(save_dir: str | os.PathLike[str], keep_last: int, token: str, latest: str = LATEST) -> list[Path]:
    """Remove the expired checkpoints of a directory; returns where they were."""
    names = {latest, LATEST, "latest_universal"}
    spared = [read_latest(save_dir, name) for name in names]
    gone = expired(scan(save_dir), max(keep_last, 1), spared)
    for number, checkpoint in enumerate(gone):
        remove(checkpoint.path, f"{token}{number}")
    return [checkpoint.path for checkpoint in gone]
