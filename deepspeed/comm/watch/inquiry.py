"""From a call that does not complete to a verdict: what this rank tells, what it asks others, and how it decides."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

from deepspeed.comm.processes import host_name
from deepspeed.comm.records import Entry
from deepspeed.comm.watch.neighbours import Neighbours
from deepspeed.comm.watch.report import GroupProgress, RankReport, WaitingCall, call_of
from deepspeed.comm.watch.store import WatchStore
from deepspeed.comm.watch.threads import all_stacks, main_place, positions
from deepspeed.comm.watch.verdict import HangVerdict, judge

_HISTORY = 32  # calls of each group that are reported
_KEPT = 5  # folders with stacks that stay on a host, the newest
_NAME = re.compile(r"deepspeed-hang-[0-9a-f]{16}")


class ReportBuilder:
    """Builds this rank's reports."""

    def __init__(self, rank: int, entries: Callable[[], Sequence[Entry]], neighbours: Neighbours | None) -> None:
        self.rank = rank
        self.neighbours = neighbours
        self._entries = entries

    def report(self, asked: int, waits: Sequence[WaitingCall], stacks: str = "") -> RankReport:
        """How this rank is now; `stacks` is the file in which its stacks are."""
        return RankReport(
            self.rank,
            host_name(),
            asked=asked,
            main=main_place(),
            waits=tuple(waits),
            groups=self._groups(),
            stacks=stacks,
            seen=self.seen(),
        )

    def seen(self) -> dict[int, RankReport]:
        """The ranks of this host that cannot answer for themselves."""
        if self.neighbours is None:
            return {}
        found = {rank: neighbour.report() for rank, neighbour in tuple(self.neighbours.found.items())}
        return {rank: report for rank, report in found.items() if report.condition or report.ended}

    def _groups(self) -> dict[str, GroupProgress]:
        calls: dict[str, list[Entry]] = {}
        for entry in self._entries():
            calls.setdefault(entry[2].name, []).append(entry)
        found, counted = {}, positions()
        groups: Any = c10d._world.pg_names  # torch has no public list of them
        for group, name in tuple(groups.items()):
            ours = "world" if group is td.GroupMember.WORLD else name
            own = calls.get(ours, [])
            entered = max((entry[0] for entry in own if not entry[1].p2p), default=0)
            found[ours] = GroupProgress(entered, counted.get(name), tuple(call_of(entry) for entry in own[-_HISTORY:]))
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


_PAUSE = 0.05
_DYING = 2.0  # seconds within which a process whose connections broke is seen as ended
_FOLLOWED = 256  # ranks of other groups whose reports are read to follow who waits for whom


def incident_of(wait: WaitingCall) -> str:
    """The same on all ranks that wait in this call."""
    return hashlib.sha256(repr(wait.call.key).encode()).hexdigest()[:16]


class Inquiry:
    """Asks and decides in the name of one rank; `serve` answers other ranks meanwhile, `stop` ends the patience."""

    def __init__(
        self,
        store: WatchStore,
        reporter: ReportBuilder,
        patience: float,
        serve: Callable[[WaitingCall | None], None],
        stop: Callable[[], bool],
    ) -> None:
        self._store = store
        self._reporter = reporter
        self._patience = patience
        self._serve = serve
        self._stop = stop

    def decide(self, wait: WaitingCall, *, over: bool) -> dict[str, Any]:
        """Ask all ranks and judge. With `over` the call has failed; if it was waited for, all write their stacks."""
        name = f"deepspeed-hang-{secrets.token_hex(8)}" if over and wait.seconds else ""
        number = self._store.ask({"stacks": name, "over": over, "by": self._reporter.rank})
        reports = self._collect(wait, number)
        verdict = judge(wait, reports, over=over)
        text = verdict.text + (_stacks(reports, name) if name else "")
        answered = sum(not (report.condition or report.ended) for report in reports.values())
        return {"text": text, "ranks": list(verdict.ranks), "answered": answered}

    def _collect(self, wait: WaitingCall, number: int) -> dict[int, RankReport]:
        until = time.monotonic() + self._patience
        settled: dict[int, RankReport] = {}
        needed = set(wait.ranks)
        while True:
            self._serve(wait)
            for rank, report in self._store.reports(needed - settled.keys()).items():
                if report.asked >= number or report.ended:
                    settled[rank] = report
            self._add_seen(needed, settled)
            needed |= _followed(settled.values(), needed)
            if needed <= settled.keys() or time.monotonic() > until or self._stop():
                break
            time.sleep(_PAUSE)
        self._add_silent(needed, settled)
        return settled

    def _add_seen(self, needed: set[int], settled: dict[int, RankReport]) -> None:
        """What ranks say of others of their host that are dead or stopped."""
        own = self._reporter.seen()
        for seen in (own, *(report.seen for report in tuple(settled.values()))):
            for rank, report in seen.items():
                if rank in needed:
                    settled.setdefault(rank, report)

    def _add_silent(self, needed: set[int], settled: dict[int, RankReport]) -> None:
        """Ranks of this host that run and do not answer: native code has their interpreter."""
        neighbours = self._reporter.neighbours
        for rank in sorted(needed - settled.keys()):
            if neighbours is not None and rank in neighbours.found:
                settled[rank] = neighbours.found[rank].report(silent=True)
        # Those of other hosts are reported by their neighbours, who have looked as well by now.
        for report in self._store.reports(settled.keys()).values():
            for rank, seen in report.seen.items():
                if rank in needed:
                    settled.setdefault(rank, seen)
        answering = {report.host for report in settled.values() if not report.condition}
        for rank in sorted(needed - settled.keys()):
            raw = self._store.find(f"hello/{rank}")
            settled[rank] = RankReport(rank, condition=_unseen(None if raw is None else raw.decode(), answering))


def _stacks(reports: dict[int, RankReport], name: str) -> str:
    """Where the stacks are: a folder of the same name on each host."""
    written = [report for report in reports.values() if report.stacks.startswith(os.sep)]
    if not written:
        return ""
    folder = PurePath(written[0].stacks).parent.parent / name
    hosts = len({report.host for report in written})
    ranks = "1 rank" if len(written) == 1 else f"{len(written)} ranks"
    return f"\n  stacks   : {folder} has those of {ranks}" + (f", on {hosts} hosts" if hosts > 1 else "")


def judge_locally(wait: WaitingCall, mine: RankReport, reporter: ReportBuilder) -> HangVerdict:
    """A judgement without the store: this rank, and what can be seen of others of this host."""
    found = {} if reporter.neighbours is None else reporter.neighbours.found
    until = time.monotonic() + _DYING
    while True:
        reports = {mine.rank: mine}
        for rank, neighbour in tuple(found.items()):
            with contextlib.suppress(OSError, ValueError):
                reports[rank] = neighbour.report()
        # The connections of a killed process break before the process is seen as dead. Rank 0 may keep the store, so
        # its end explains the loss; the end of another rank may only follow from it.
        told = any(report.condition for report in reports.values()) or (0 in reports and reports[0].ended)
        if told or time.monotonic() > until:
            break
        time.sleep(_PAUSE)
    verdict = judge(replace(wait, ranks=tuple(rank for rank in wait.ranks if rank in reports)), reports)
    return verdict if verdict.ranks else HangVerdict((), "no rank of this host is at fault")


def _unseen(host: str | None, answering: set[str]) -> str:
    """What is said of a rank of which nobody knows more."""
    if host is None:
        return "has never made a collective: it may not have been started"
    if host in answering:
        return f"does not answer; it runs on {host}, where others do"
    return f"does not answer, nor does any rank of its host {host}: the host, or the network to it, is down"


def _followed(reports: Iterable[RankReport], needed: set[int]) -> set[int]:
    """The ranks that others, who are late, wait for in other groups."""
    found = {rank for report in reports for wait in report.waits for rank in wait.ranks} - needed
    return set(sorted(found)[: max(0, _FOLLOWED - len(needed))])
