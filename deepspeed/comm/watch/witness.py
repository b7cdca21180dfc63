"""What this rank tells when it is asked: its report, and its stacks in a file that only its user can read."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

from deepspeed.comm.records import Entry
from deepspeed.comm.watch.look import all_stacks, main_place
from deepspeed.comm.watch.neighbours import Neighbours, host_name
from deepspeed.comm.watch.report import Member, Report, Wait, call_of

__all__ = ["Witness"]

_HISTORY = 32  # calls of each group that are told
_KEPT = 5  # folders with stacks that stay on a host, the newest
_NAME = re.compile(r"deepspeed-hang-[0-9a-f]{16}")


class Witness:
    """Builds this rank's reports."""

    def __init__(self, rank: int, entries: Callable[[], Sequence[Entry]], neighbours: Neighbours | None) -> None:
        self.rank = rank
        self.neighbours = neighbours
        self._entries = entries

    def report(self, asked: int, waits: Sequence[Wait], stacks: str = "") -> Report:
        """How this rank is now; `stacks` is the file in which its stacks are."""
        return Report(
            self.rank,
            host_name(),
            asked=asked,
            main=main_place(),
            waits=tuple(waits),
            groups=self._groups(),
            stacks=stacks,
            seen=self.seen(),
        )

    def seen(self) -> dict[int, Report]:
        """The ranks of this host that cannot answer for themselves."""
        if self.neighbours is None:
            return {}
        found = {rank: neighbour.report() for rank, neighbour in tuple(self.neighbours.found.items())}
        return {rank: report for rank, report in found.items() if report.condition or report.ended}

    def _groups(self) -> dict[str, Member]:
        calls: dict[str, list[Entry]] = {}
        for entry in self._entries():
            calls.setdefault(entry[2].name, []).append(entry)
        found = {}
        world = td.GroupMember.WORLD
        groups: Any = c10d._world.pg_names  # torch has no public list of them
        for group, name in tuple(groups.items()):
            ours = "world" if group is world else name
            own = calls.get(ours, [])
            entered = max((entry[0] for entry in own if not entry[1].p2p), default=0)
            try:
                position = group._get_sequence_number_for_group()
            except RuntimeError:  # a backend that does not count
                position = None
            found[ours] = Member(entered, position, tuple(call_of(entry) for entry in own[-_HISTORY:]))
        return found


def write_stacks(folder: Path | None, name: str, rank: int) -> str:
    """Write the stacks of all threads to a file of a private folder; where it is, or why it is not."""
    if not _NAME.fullmatch(name):
        return ""
    try:
        path = (Path(tempfile.gettempdir()) if folder is None else folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
            _remove_old(path.parent)  # by the first rank of the host that comes
        except FileExistsError:
            pass
        if not _is_own(path.lstat()):
            return ""  # another user's, who guessed the name
        file = path / f"rank-{rank}.txt"
        file.write_text(all_stacks())
    except OSError as error:
        return f"(not written: {error})"
    return str(file)


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _remove_old(folder: Path) -> None:
    """Nothing else ever removes stacks: a job that hangs does not end well, and its user reads them later."""
    own = []
    for path in folder.glob("deepspeed-hang-*"):
        with suppress(OSError):  # another job has just removed it
            if _NAME.fullmatch(path.name) and _is_own(path.lstat()):
                own.append((path.lstat().st_mtime, path))
    for _, path in sorted(own)[:-_KEPT]:
        shutil.rmtree(path, ignore_errors=True)
