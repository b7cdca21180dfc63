"""The words about a job that did not end well: which rank is at fault or failed first, how, and the last it said."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.comm.verdict_pipe import ReportedVerdict
from deepspeed.launcher.processes import describe_exit
from deepspeed.launcher.protocol import RankPlan

SSH_FAILED = 255
_FRAME = re.compile(r'(\[rank\d+\]:)?\s+File ".*", line \d+, in ')  # a line of a traceback, with torch's prefix


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended: `code` as in `subprocess`, `at` in seconds after the start, by itself or told to stop."""

    plan: RankPlan
    pid: int
    code: int
    at: float
    told: bool
    source: str  # which output `lines` are from
    lines: Sequence[str] = ()
    verdict: ReportedVerdict | None = None  # whom its watch for hangs found at fault right before it ended


@dataclass(frozen=True, slots=True)
class LostHosts:
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


def failure_report(first: RankEnd, others: Sequence[RankEnd], host: str) -> str:
    """The report about a failed job, for the end of its output.

    A rank that ended because it waited in vain is a victim: the ranks' own verdict then says who is at fault.
    """
    verdict = first.verdict
    if verdict is None:
        text = [f"rank {first.plan.rank} failed first: it {_how(first)}", *_place(first, host), *_said(first)]
    else:
        text = [f"the job failed because {verdict.text}"]
        here = {ending.plan.rank: ending for ending in (first, *others)}
        for culprit in [here[rank] for rank in verdict.ranks if rank in here][:1]:
            if not culprit.told:
                text.append(f"  ended:   rank {culprit.plan.rank} {_how(culprit)}")
            text += _place(culprit, host)
            if not culprit.told and culprit.code != 0 and culprit is not first:
                text += _said(culprit)
        if first.plan.rank not in verdict.ranks[:1]:
            text.append(f"  noticed: by rank {first.plan.rank}, which {_how(first)}")
    for other in sorted(others, key=lambda ending: ending.at):
        if not other.told and other.code != 0:
            text.append(f"  then, before it was told to stop, rank {other.plan.rank} {describe_exit(other.code)}")
    if told := [other.plan.rank for other in others if other.told]:
        text.append(f"  stopped because of this: {rank_list(told)}")
    return "\n".join(text)


def _how(ending: RankEnd) -> str:
    return f"{describe_exit(ending.code)} after {ending.at:.1f} s"


def _place(ending: RankEnd, host: str) -> list[str]:
    plan = ending.plan
    text = [f"  where:   host {host}, local rank {plan.local_rank}, pid {ending.pid}", f"  command: {plan.shown}"]
    if plan.log is not None:
        text.append(f"  log:     {plan.log}")
    if not ending.told and (hint := _hint(ending.code)):
        text.append(f"  hint:    {hint}")
    return text


def _said(ending: RankEnd) -> list[str]:
    """The last lines of a rank; of a traceback that the user has seen already, the innermost line and the error."""
    lines = ending.lines
    if not lines:
        return [f"  it wrote nothing to {ending.source}"]
    frames = [at for at, line in enumerate(lines) if _FRAME.match(line)]
    if frames and ending.plan.log is None:
        lines = lines[frames[-1] :]
    return [f"  its last lines ({ending.source}):", *(f"    | {line}" for line in lines)]


def _hint(code: int) -> str | None:
    if code == -signal.SIGKILL:
        return "the launcher did not send it: another process did, or the kernel because memory ran out (see dmesg)"
    if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGABRT):
        return "native code crashed; PYTHONFAULTHANDLER=1 shows the Python line it was called from"
    return None


def lost_report(loss: LostHosts) -> str:
    """The report about hosts that could not be reached, or whose ranks never came to start."""
    program = Path(loss.command[0]).name
    what = f"host {loss.host}" if loss.host else program
    text = [f"{what}: {program} {describe_exit(loss.code)}, and no rank there told of a failure"]
    if program == "ssh" and loss.code == SSH_FAILED:
        text.append(f"  hint:    the host was not reached, or the connection broke; try: ssh {loss.host} true")
    if loss.lines:
        text += ["  its last lines (stderr):", *(f"    | {line}" for line in loss.lines)]
    return "\n".join(text)
