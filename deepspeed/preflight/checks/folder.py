"""The checkpoint folder: every host can write to it, there is room, it is fast, and it is one folder for all hosts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as td

from deepspeed.config.memory import size_text
from deepspeed.io.trial import Trial, speed
from deepspeed.preflight.arguments import FOLDER_OPTIONS, option_of
from deepspeed.preflight.check import (
    CheckFinding,
    Level,
    PreflightCheck,
    RankFact,
    ThisRank,
    finding,
    grouped,
    name_ranks,
    passed,
)

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


class FolderCheck(PreflightCheck[FolderFact]):
    """A save would succeed, and take a bearable time."""

    name = "checkpoint_folder"
    fact = FolderFact

    def gather(self, here: ThisRank) -> FolderFact:
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

    def judge(self, told: Sequence[RankFact[FolderFact]]) -> list[CheckFinding]:
        looked = [each for each in told if each.fact.looked]
        if not looked:
            return [finding(Level.WARNING, "no rank is the first of its host, so that nobody looked")]
        found = []
        good = [each for each in looked if each.fact.error is None]
        errors = grouped(((each.fact.folder, each.fact.error), each) for each in looked if each.fact.error is not None)
        for (folder, error), some in errors.items():
            what = f"{name_ranks(some)} cannot write to {folder}: {error}"
            advice = "give --checkpoint a folder that can be written, or make room there"
            found.append(finding(Level.PROBLEM, what, some, advice))
        found += [each for one in good for each in _room(one)]
        slow = [each for each in good if each.fact.speed is not None and each.fact.speed < _SLOW]
        if slow:
            worst = min(each.fact.speed or 0.0 for each in slow)
            verb = "writes" if len(slow) == 1 else "write"
            what = f"{name_ranks(slow)} {verb} only {worst / 1e6:.1f} MB/s to {slow[0].fact.folder}"
            advice = "save to a faster disk, or in the background: checkpoint.writer.decoupled in the config"
            found.append(finding(Level.WARNING, what, slow, advice))
        if found:
            return found
        first = good[0].fact
        least = min(each.fact.speed or 0.0 for each in good)
        return [
            passed(f"{first.folder} ({first.origin}): {size_text(first.free)} free, {least / 1e9:.2f} GB/s per host")
        ]


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


def _room(one: RankFact[FolderFact]) -> Iterator[CheckFinding]:
    fact = one.fact
    place = f"{name_ranks([one])}: {fact.folder} has"
    if fact.needed is not None and fact.free < fact.needed:
        what = f"{place} {size_text(fact.free)} free, and a checkpoint takes about {size_text(fact.needed)}"
        yield finding(Level.PROBLEM, what, [one], "make room, or name another folder")
    if fact.needed is None and fact.free < _LITTLE:
        what = f"{place} only {size_text(fact.free)} free"
        yield finding(Level.WARNING, what, [one], "make room; --params tells whether it is enough")


# ---- one folder


@dataclass(frozen=True, slots=True)
class SharedFolderFact:
    """Whether a host sees the file that rank 0 has made; none where nobody looked, or there is no file."""

    sees: bool | None = None
    local: bool = False
    """The config says that every host keeps its own."""


class SharedFolderCheck(PreflightCheck[SharedFolderFact]):
    """Rank 0 makes a file, the first rank of every host looks for it."""

    name = "shared_folder"
    together = True
    fact = SharedFolderFact

    def gather(self, here: ThisRank) -> SharedFolderFact:
        local = here.schema is not None and here.schema.checkpoint.use_node_local_storage
        folder = nearest(Path(folder_of(here.options.checkpoint, here.program.arguments)[0]).absolute())
        made: list[str | None] = [None]
        try:
            if here.rank == 0:
                made = [_make_file(folder)]
            td.broadcast_object_list(made, 0, group=here.all_ranks.messages)
            name = made[0]
            sees = None
            if name is not None and here.rank in here.all_ranks.first_ranks:
                sees = (folder / Path(name).name).exists()
            td.barrier(group=here.all_ranks.messages)
            return SharedFolderFact(sees, local)
        finally:
            if here.rank == 0 and made[0] is not None:
                os.unlink(made[0])

    def judge(self, told: Sequence[RankFact[SharedFolderFact]]) -> list[CheckFinding]:
        looked = [each for each in told if each.fact.sees is not None]
        blind = [each for each in looked if not each.fact.sees]
        if blind and not looked[0].fact.local:
            what = f"{name_ranks(blind)} {'does' if len(blind) == 1 else 'do'} not see what rank 0 writes to the folder"
            advice = "save to a shared file system, or set checkpoint.use_node_local_storage"
            return [finding(Level.WARNING, what, blind, advice)]
        if len(looked) < 2:
            return [passed("one host, one folder" if looked else "nobody could look")]
        return [passed("every host keeps its own" if blind else f"{len(looked)} hosts see the same files")]


def _make_file(folder: Path) -> str | None:
    """A new file's path, None if none can be made: the check of the folder tells why, and the others wait here."""
    try:
        descriptor, path = tempfile.mkstemp(prefix=".preflight-", dir=folder)
    except OSError:
        return None
    os.close(descriptor)
    return path
