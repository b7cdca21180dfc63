"""The words about a job that did not end well: which rank failed first, how, and the last it said."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.launcher.plan import RankPlan
from deepspeed.launcher.processes import described

__all__ = ["Ending", "Loss", "failure", "lost", "rank_list"]

_SSH_FAILED = 255


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended: `code` as in `subprocess`, `at` in seconds after the start, by itself or told to stop."""

    plan: RankPlan
    pid: int
    code: int
    at: float
    told: bool
    source: str  # which output `lines` are from
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Loss:
    """How a program that reaches other hosts ended while no rank told of a failure; no `host`: it reaches several."""

    host: str
    command: Sequence[str]
    code: int
    lines: Sequence[str] = ()


def rank_list(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1", or where they are many "ranks 0, 1, 2, … 63 (64 in all)"."""
    numbers = sorted(ranks)
    word = "rank" if len(numbers) == 1 else "ranks"
    if len(numbers) > 8:
        return f"{word} {', '.join(map(str, numbers[:3]))}, … {numbers[-1]} ({len(numbers)} in all)"
    return f"{word} {', '.join(map(str, numbers))}"


def failure(first: Ending, others: Sequence[Ending], host: str) -> str:
    """The report about a failed job, for the end of its output."""
    plan = first.plan
    text = [
        f"rank {plan.rank} failed first: it {described(first.code)} after {first.at:.1f} s",
        f"  where:   host {host}, local rank {plan.local_rank}, pid {first.pid}",
        f"  command: {plan.shown}",
    ]
    if plan.log is not None:
        text.append(f"  log:     {plan.log}")
    if hint := _hint(first.code):
        text.append(f"  hint:    {hint}")
    if first.lines:
        text.append(f"  its last lines ({first.source}):")
        text += [f"    | {line}" for line in first.lines]
    else:
        text.append(f"  it wrote nothing to {first.source}")
    for other in sorted(others, key=lambda ending: ending.at):
        if not other.told and other.code != 0:
            text.append(f"  then, before it was told to stop, rank {other.plan.rank} {described(other.code)}")
    if told := [other.plan.rank for other in others if other.told]:
        text.append(f"  stopped because of this: {rank_list(told)}")
    return "\n".join(text)


def _hint(code: int) -> str | None:
    if code == -signal.SIGKILL:
        return "the launcher did not do this: somebody did, or the kernel because memory ran out (see dmesg)"
    if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGABRT):
        return "native code crashed; PYTHONFAULTHANDLER=1 shows the Python line it was called from"
    return None


def lost(loss: Loss) -> str:
    """The report about hosts that could not be reached, or whose ranks never came to start."""
    program = Path(loss.command[0]).name
    what = f"host {loss.host}" if loss.host else program
    text = [f"{what}: {program} {described(loss.code)}, and no rank there told of a failure"]
    if program == "ssh" and loss.code == _SSH_FAILED:
        text.append(f"  hint:    the host was not reached, or the connection broke; try: ssh {loss.host} true")
    if loss.lines:
        text += ["  its last lines (stderr):", *(f"    | {line}" for line in loss.lines)]
    return "\n".join(text)
