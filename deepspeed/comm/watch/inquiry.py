"""From a call that does not complete to a verdict: ask, collect what comes, look at those who cannot answer, decide."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from deepspeed.comm.watch.mailbox import Mailbox
from deepspeed.comm.watch.report import Report, Wait
from deepspeed.comm.watch.verdict import Verdict, judge
from deepspeed.comm.watch.witness import Witness

__all__ = ["Inquiry", "incident_of"]

_PAUSE = 0.05
_FOLLOWED = 256  # ranks of other groups whose reports are read to follow who waits for whom


def incident_of(wait: Wait) -> str:
    """The same on all ranks that wait in this call."""
    return hashlib.sha256(repr(wait.call.key).encode()).hexdigest()[:16]


class Inquiry:
    """Asks and decides in the name of one rank; `serve` answers other ranks meanwhile, `stop` ends the patience."""

    def __init__(
        self,
        mailbox: Mailbox,
        witness: Witness,
        patience: float,
        serve: Callable[[Wait | None], None],
        stop: Callable[[], bool],
    ) -> None:
        self._mailbox = mailbox
        self._witness = witness
        self._patience = patience
        self._serve = serve
        self._stop = stop

    def decide(self, wait: Wait, *, over: bool) -> dict[str, Any]:
        """Ask all ranks and judge. With `over` the call has failed; if it was waited for, all write their stacks."""
        name = f"deepspeed-hang-{secrets.token_hex(8)}" if over and wait.seconds else ""
        number = self._mailbox.ask({"stacks": name, "over": over, "by": self._witness.rank})
        reports = self._collect(wait, number)
        verdict = judge(wait, reports, over=over)
        text = verdict.text + (_stacks(reports, name) if name else "")
        answered = sum(not (report.condition or report.ended) for report in reports.values())
        return {"text": text, "ranks": list(verdict.ranks), "answered": answered}

    def _collect(self, wait: Wait, number: int) -> dict[int, Report]:
        until = time.monotonic() + self._patience
        settled: dict[int, Report] = {}
        needed = set(wait.ranks)
        while True:
            self._serve(wait)
            for rank, report in self._mailbox.reports(needed - settled.keys()).items():
                if report.asked >= number or report.ended:
                    settled[rank] = report
            self._add_seen(needed, settled)
            needed |= _followed(settled.values(), needed)
            if needed <= settled.keys() or time.monotonic() > until or self._stop():
                break
            time.sleep(_PAUSE)
        self._add_silent(needed, settled)
        return settled

    def _add_seen(self, needed: set[int], settled: dict[int, Report]) -> None:
        """What ranks say of others of their host that are dead or stopped."""
        own = self._witness.seen()
        for seen in (own, *(report.seen for report in tuple(settled.values()))):
            for rank, report in seen.items():
                if rank in needed:
                    settled.setdefault(rank, report)

    def _add_silent(self, needed: set[int], settled: dict[int, Report]) -> None:
        """Ranks of this host that run and do not answer: native code has their interpreter."""
        neighbours = self._witness.neighbours
        for rank in sorted(needed - settled.keys()):
            if neighbours is not None and rank in neighbours.found:
                settled[rank] = neighbours.found[rank].report(silent=True)
        # Those of other hosts are told of by their neighbours, who have looked as well by now.
        for report in self._mailbox.reports(settled.keys()).values():
            for rank, seen in report.seen.items():
                if rank in needed:
                    settled.setdefault(rank, seen)
        answering = {report.host for report in settled.values() if not report.condition}
        for rank in sorted(needed - settled.keys()):
            raw = self._mailbox.find(f"hello/{rank}")
            settled[rank] = Report(rank, condition=_unseen(None if raw is None else raw.decode(), answering))


def _stacks(reports: dict[int, Report], name: str) -> str:
    """Where the stacks are: a folder of the same name on each host."""
    written = [report for report in reports.values() if report.stacks.startswith(os.sep)]
    if not written:
        return ""
    folder = PurePath(written[0].stacks).parent.parent / name
    hosts = len({report.host for report in written})
    ranks = "1 rank" if len(written) == 1 else f"{len(written)} ranks"
    return f"\n  stacks   : {folder} has those of {ranks}" + (f", on {hosts} hosts" if hosts > 1 else "")


def judge_by_eye(wait: Wait, mine: Report, witness: Witness) -> Verdict:
    """A judgement without the store: this rank, and what can be seen of others of this host."""
    reports = {mine.rank: mine}
    if witness.neighbours is not None:
        for rank, neighbour in tuple(witness.neighbours.found.items()):
            with contextlib.suppress(OSError, ValueError):
                reports[rank] = neighbour.report()
    found = judge(replace(wait, ranks=tuple(rank for rank in wait.ranks if rank in reports)), reports)
    return found if found.ranks else Verdict((), "no rank of this host is at fault")


def _unseen(host: str | None, answering: set[str]) -> str:
    """What is said of a rank of which nobody knows more."""
    if host is None:
        return "has never made a collective: it may not have been started"
    if host in answering:
        return f"does not answer; it runs on {host}, where others do"
    return f"does not answer, nor does any rank of its host {host}: the host, or the network to it, is down"


def _followed(reports: Iterable[Report], needed: set[int]) -> set[int]:
    """The ranks that others, who are late, wait for in other groups."""
    found = {rank for report in reports for wait in report.waits for rank in wait.ranks} - needed
    return set(sorted(found)[: max(0, _FOLLOWED - len(needed))])
