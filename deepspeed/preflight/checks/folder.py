"""The checkpoint folder: every host can write to it, there is room, and it is as fast as a save needs it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.config.memory import size_text
from deepspeed.io.runs import speed
from deepspeed.io.trial import Trial
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, who
from deepspeed.preflight.program import FOLDER_OPTIONS, option_of

__all__ = ["Folder", "FolderFact", "folder_of", "nearest"]

_WHOLE_STATE = 16  # bytes of a parameter in a checkpoint of 16-bit training with Adam, and some more
_LITTLE = 10 * 10**9
_SLOW = 50e6  # bytes per second at which saving a model of 1B parameters takes minutes


@dataclass(frozen=True, slots=True)
class FolderFact:
    """What the first rank of a host found; `error` is why nothing can be written."""

    folder: str = ""
    origin: str = ""
    error: str | None = None
    free: int = 0
    speed: float | None = None
    """Bytes per second, with all hosts writing at once."""
    needed: int | None = None
    looked: bool = True


class Folder(Check[FolderFact]):
    """A save would succeed, and take a bearable time."""

    name = "checkpoint_folder"
    about = "room, permission and write speed of the checkpoint folder"
    fact = FolderFact

    def gather(self, here: Here) -> FolderFact:
        if not here.is_first:
            return FolderFact(looked=False)
        name, origin = folder_of(here.options.checkpoint, here.program.arguments)
        needed = None if here.options.params is None else here.options.params * _WHOLE_STATE
        place = nearest(Path(name).absolute())
        try:
            room = os.statvfs(place)
            free = room.f_bavail * room.f_frsize
            size = here.options.write_size
            rate = speed(Trial(read=False, io_size=size, loops=1, warmup_loops=0), [(str(place), 0)]) * 1e9
        except OSError as error:
            return FolderFact(name, origin, f"{error.strerror or error} ({place})", needed=needed)
        return FolderFact(name, origin, None, free, rate, needed)

    def judge(self, told: Sequence[Told[FolderFact]]) -> list[Finding]:
        looked = [each for each in told if each.fact.looked]
        if not looked:
            return [Finding(Level.WARNING, "no rank is the first of its host, so that nobody looked")]
        found = []
        errors: dict[tuple[str, str | None], list[Told[FolderFact]]] = {}
        for each in looked:
            if each.fact.error is not None:
                errors.setdefault((each.fact.folder, each.fact.error), []).append(each)
        for (folder, error), some in errors.items():
            what = f"{who(some)} cannot write to {folder}: {error}"
            advice = "give --checkpoint a folder that can be written, or make room there"
            found.append(Finding(Level.PROBLEM, what, tuple(each.rank for each in some), advice))
        good = [each for each in looked if each.fact.error is None]
        found += [finding for each in good for finding in _room(each)]
        slow = [each for each in good if each.fact.speed is not None and each.fact.speed < _SLOW]
        if slow:
            worst = min(each.fact.speed or 0.0 for each in slow)
            verb = "writes" if len(slow) == 1 else "write"
            what = f"{who(slow)} {verb} only {worst / 1e6:.1f} MB/s to {slow[0].fact.folder}"
            advice = "save to a faster disk, or in the background: checkpoint.writer.decoupled in the config"
            found.append(Finding(Level.WARNING, what, tuple(each.rank for each in slow), advice))
        if found:
            return found
        first = good[0].fact
        least = min(each.fact.speed or 0.0 for each in good)
        what = f"{first.folder} ({first.origin}): {size_text(first.free)} free, {least / 1e9:.2f} GB/s per host"
        return [Finding(Level.OK, what)]


def folder_of(option: str | None, arguments: Sequence[str]) -> tuple[str, str]:
    """The folder, and who says so: the option, the script's arguments, or nobody: then it is the working folder."""
    if option is not None:
        return option, "--checkpoint"
    told = option_of(arguments, FOLDER_OPTIONS)
    if told is not None:
        return told, "the script's arguments"
    return os.getcwd(), "the working folder; --checkpoint names another"


def nearest(path: Path) -> Path:
    """The folder itself, or the one in which it would be made."""
    return next((level for level in (path, *path.parents) if level.exists()), path)


def _room(each: Told[FolderFact]) -> list[Finding]:
    fact = each.fact
    if fact.needed is not None and fact.free < fact.needed:
        what = f"{who([each])}: {fact.folder} has {size_text(fact.free)} free, and a checkpoint takes about "
        return [
            Finding(Level.PROBLEM, what + size_text(fact.needed), (each.rank,), "make room, or name another folder")
        ]
    if fact.needed is None and fact.free < _LITTLE:
        what = f"{who([each])}: {fact.folder} has only {size_text(fact.free)} free"
        return [Finding(Level.WARNING, what, (each.rank,), "make room; --params tells whether it is enough")]
    return []
