"""Clocks: hosts that disagree about the time break logs, tokens and the timeouts of elastic jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as td

from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, who

__all__ = ["Clock", "ClockFact", "offset_of"]

_ROUNDS = 8
_WARNED = 0.5  # seconds
_WRONG = 5.0  # as long as torch's elastic rendezvous waits for a sign of life


@dataclass(frozen=True, slots=True)
class ClockFact:
    """Seconds by which a host's clock is ahead of rank 0's, and how exact that is; none where nobody measured."""

    ahead: float | None = None
    exact: float = 0.0


class Clock(Check[ClockFact]):
    """Each host asks rank 0 for the time, and takes the answer that came back fastest."""

    name = "clock"
    about = "clocks of the hosts, compared by round trips"
    together = True
    fact = ClockFact

    def gather(self, here: Here) -> ClockFact:
        assert here.company is not None, "this check needs all ranks"
        group = here.company.messages
        if here.rank == 0:
            answer, question = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            for other in here.company.first_ranks:
                for _ in range(_ROUNDS if other else 0):
                    td.recv(question, other, group=group)
                    answer[0] = here.now()
                    td.send(answer, other, group=group)
            return ClockFact(0.0)
        if here.rank not in here.company.first_ranks:
            return ClockFact()
        trips = []
        told = torch.zeros(1, dtype=torch.int64)
        for _ in range(_ROUNDS):
            sent = here.now()
            td.send(told, 0, group=group)
            td.recv(told, 0, group=group)
            trips.append((sent, int(told.item()), here.now()))
        return offset_of(trips)

    def judge(self, told: Sequence[Told[ClockFact]]) -> list[Finding]:
        known = [each for each in told if each.fact.ahead is not None]
        found = []
        for each in known:
            ahead = each.fact.ahead or 0.0
            certain = abs(ahead) - each.fact.exact
            if certain > _WARNED:
                level = Level.PROBLEM if certain > _WRONG else Level.WARNING
                way = "ahead of" if ahead > 0 else "behind"
                what = f"the clock of {who([each])} is {abs(ahead):.3g} s {way} that of rank 0"
                found.append(Finding(level, what, (each.rank,), "let NTP or chrony set the clocks of all hosts"))
        if found:
            return found
        if len(known) < 2:
            return [Finding(Level.OK, "one host, one clock")]
        worst = max(abs(each.fact.ahead or 0.0) for each in known)
        return [Finding(Level.OK, f"{len(known)} hosts agree within {max(worst * 1e3, 0.001):.3g} ms")]


def offset_of(trips: Sequence[tuple[int, int, int]]) -> ClockFact:
    """From (sent, their time, received) in nanoseconds: of the shortest trip, half of which is what we do not know."""
    sent, theirs, received = min(trips, key=lambda trip: trip[2] - trip[0])
    return ClockFact(((sent + received) / 2 - theirs) / 1e9, (received - sent) / 2e9)
