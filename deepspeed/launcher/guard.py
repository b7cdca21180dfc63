"""The guard: starts the ranks of a node, passes on their output and signals, and leaves no process behind.

[Note: the guard] The launcher (torch loaded) starts this small process in a session of its own, and waits for it. It is
the parent of the ranks, each again in a session of its own:

- If the launcher is gone, see process_loop.py, everything below the guard is killed.
- Orphans become children of the guard (Linux), so it finds every process that a rank ever started, daemons included.
- The kernel kills the ranks if the guard dies (Linux); the launcher then kills the orphans that come to it.

Elsewhere a process is only found by the group of its rank, and ranks outlive a guard that is killed.

[Note: who failed first] Each rank's end makes a pidfd readable, and epoll reports descriptors in the order in which
they became ready. So the first failure is known even when the guard was late and finds several ranks dead.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deepspeed.comm.verdict_pipe import ReportedVerdict, VerdictPipe
from deepspeed.launcher import processes
from deepspeed.launcher.output import OutputPipe, labelled, last_lines
from deepspeed.launcher.process_loop import FAILURE_GRACE, SIGNAL_GRACE, TICK, Child, ProcessLoop, run_plan
from deepspeed.launcher.protocol import RETIRE, NodePlan, RankPlan, RelaySetting, encode
from deepspeed.log import logger

_CHILDREN_GRACE = 2.0  # seconds that processes which ranks left behind get to end by themselves
_KILL_WAIT = 10.0  # seconds after SIGKILL until a process counts as stuck in the kernel


@dataclass(kw_only=True)
class _RunningRank(Child):
    """A started rank; `at` is in seconds after the start, `told` means that it ended after the guard told it to."""

    plan: RankPlan
    log_start: int
    started: float = field(default_factory=time.monotonic)
    told: bool = False
    verdict: ReportedVerdict | None = None  # the newest one of its watch for hangs

    def ending(self) -> RankEnd:
        """How it ended; its output must have been read to the end."""
        source, lines = "stdout and stderr", []
        if self.plan.log is not None:
            lines = last_lines(self.plan.log, self.log_start)
        elif len(self.channels) == 1:
            lines = self.channels[0].tail.lines()
        else:  # what went wrong is told on stderr, if anything was
            out, err = self.channels
            source, chosen = ("stderr", err) if err.tail.lines() else ("stdout", out)
            lines = chosen.tail.lines()
        code = 0 if self.code is None else self.code
        verdict = self.verdict if self.verdict is not None and self.verdict.explains(self.started + self.at) else None
        return RankEnd(self.plan, self.process.pid, code, self.at, self.told, source, lines, verdict)


class Guard(ProcessLoop[_RunningRank]):
    """Runs the plan of one node."""

    def __init__(self, plan: NodePlan, control: int) -> None:
        super().__init__(control, plan.pid_file)
        self._plan = plan
        self._first: _RunningRank | None = None
        self._hurried = self._stuck = self._retiring = False
        self._locks = {1: threading.Lock(), 2: threading.Lock()}
        self._relayed = RelaySetting.parse(plan.relay)
        self._verdicts = VerdictPipe()
        self._selector.register(self._verdicts.source, selectors.EVENT_READ, self._on_verdicts)

    # ---- starting

    def _start(self) -> str | None:
        arm = processes.end_with_parent()
        for plan in self._plan.ranks:
            try:
                self._children.append(self._spawn(plan, arm))
            except (OSError, subprocess.SubprocessError) as error:
                return f"rank {plan.rank} could not be started: {error}; its command is: {plan.shown}"
        self._start_output()
        return None

    def _spawn(self, plan: RankPlan, arm: Callable[[], None]) -> _RunningRank:
        channels: list[OutputPipe] = []
        log_start = 0
        if plan.log is not None:
            out = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            log_start = os.fstat(out).st_size
            inlets = (out, out)
        else:
            targets = (1,) if os.path.sameopenfile(1, 2) else (1, 2)
            shape = None
            if self._relayed is not None and self._relayed.labels:
                shape = partial(labelled, label=f"[{plan.rank}] ".encode())
            channels = [OutputPipe(target, self._stop_read, self._locks[target], shape) for target in targets]
            inlets = (channels[0].inlet, channels[-1].inlet)

        def prepare() -> None:
            arm()
            if plan.cores:
                os.sched_setaffinity(0, plan.cores)

        process = subprocess.Popen(
            plan.command,
            env={**os.environ, **plan.environment, **self._verdicts.environment},
            stdout=inlets[0],
            stderr=inlets[1],
            start_new_session=True,
            preexec_fn=prepare,
        )
        if plan.log is not None:
            os.close(inlets[0])
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel before 5.3
                descriptor = os.pidfd_open(process.pid)
                self._selector.register(descriptor, selectors.EVENT_READ, process.pid)
        return _RunningRank(process=process, channels=channels, plan=plan, log_start=log_start)

    # ---- waiting

    def _wait(self) -> None:
        while self._running() or (not self._stuck and self._targets()):  # processes that ranks started
            self._turn(TICK if self._agenda else None)
            self._keep_agenda()
        self._reap([])  # what has just ended is not left to the parent of this process
        # All output that there is is passed on, unless the user is in a hurry.
        os.close(self._stop_write)
        while not self._hurried and any(channel.busy() for rank in self._children for channel in rank.channels):
            self._turn(TICK / 10)

    def _turn(self, wait: float | None) -> None:
        """Wait for something to happen, and deal with it."""
        order = []
        for key, _ in self._selector.select(wait):
            if callable(key.data):
                key.data()
            else:
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
                order.append(key.data)
        self._reap(order)

    def _reap(self, order: list[int]) -> None:
        """Note the end of ranks, those in `order` first; then let orphans that were adopted go."""
        watched = {key.data for key in self._selector.get_map().values()}
        running = {rank.process.pid: rank for rank in self._running()}
        for pid in [*order, *(pid for pid in running if pid not in watched and pid not in order)]:
            found, waited = os.waitpid(pid, os.WNOHANG)
            if found:
                self._ended(running[pid], os.waitstatus_to_exitcode(waited))
        while sys.platform == "linux":
            try:
                orphan = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if orphan is None or any(rank.process.pid == orphan.si_pid for rank in self._running()):
                return  # a rank: its pidfd is readable now, and says who was first
            os.waitpid(orphan.si_pid, 0)

    def _ended(self, rank: _RunningRank, code: int) -> None:
        rank.code = rank.process.returncode = code
        rank.at = time.monotonic() - rank.started
        rank.told = self._stopping or self._killed or self._signal is not None
        logger.debug("rank %d (pid %d) %s", rank.plan.rank, rank.process.pid, processes.describe_exit(code))
        if code != 0 and not rank.told and self._first is None:
            self._first = rank
        if not self._running() and not self._killed and self._first is None:
            self._plan_end(_CHILDREN_GRACE, self._end_children)

    def _targets(self) -> list[int]:
        """Every process below the guard, or elsewhere than on Linux every group that a rank leads."""
        if processes.LINUX:
            return processes.descendants(os.getpid())
        groups = []
        for rank in self._children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, 0)
                groups.append(-rank.process.pid)
        return groups

    def _on_verdicts(self) -> None:
        for number, told in self._verdicts.read().items():
            for rank in self._children:
                if rank.plan.rank == number:
                    rank.verdict = told

    # ---- signals

    def _on_own_signal(self, number: int) -> None:
        """A signal sent to the guard itself counts as if the launcher had passed it on."""
        if self._signal is None:
            self._on_stop(number)

    def _on_orphaned(self) -> None:
        self._hurried = True
        logger.error("the launcher was killed: ending %s", rank_list([each.rank for each in self._plan.ranks]))
        self._kill()

    def _on_signal(self, number: int) -> None:
        if number == RETIRE:
            self._retiring = True
            self._on_stop(signal.SIGTERM)
        elif number == signal.SIGWINCH:
            for rank in self._children:
                for channel in rank.channels:
                    channel.resize()
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            sent = signal.SIGSTOP if number == signal.SIGTSTP else signal.SIGCONT
            processes.send(sent, [-rank.process.pid for rank in self._running()])
        else:
            self._forward(number)

    def _on_stop(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._signal is None and self._first is None and self._running():
            self._signal = number
            log = logger.debug if self._retiring else logger.warning
            log("%s: passed on to %s", name, rank_list([rank.plan.rank for rank in self._running()]))
            self._forward(number)
            self._plan_end(SIGNAL_GRACE, self._kill)
        elif number == signal.SIGINT or not self._running():  # the user insists, or only output is waited for
            self._hurried = True
            self._kill()

    def _forward(self, number: int) -> None:
        # A Python rank decides itself what a signal means to its data loaders; a shell script would not tell anybody.
        sign = -1 if self._plan.forward_to_groups else 1
        processes.send(number, [sign * rank.process.pid for rank in self._running()])

    # ---- ending

    def _keep_agenda(self) -> None:
        """Do what is due; processes that appear after a SIGKILL are killed as well."""
        if self._first is not None and not self._stopping:
            self._stop_others(self._first)
        if self._killed:
            processes.send(signal.SIGKILL, self._targets())
        self._do_due()

    def _stop_others(self, first: _RunningRank) -> None:
        self._stopping = True
        self._tell(first, kind="failed", code=first.code)
        if others := [rank.plan.rank for rank in self._running()]:
            what = processes.describe_exit(first.code or 0)
            logger.error("rank %d %s: ending %s", first.plan.rank, what, rank_list(others))
        processes.send(signal.SIGTERM, self._targets())
        self._plan_end(FAILURE_GRACE, self._kill)

    def _end_children(self) -> None:
        left = self._targets()
        logger.warning("all ranks have ended but left processes behind: ending pid %s", ", ".join(map(str, left)))
        processes.send(signal.SIGTERM, left)
        self._plan_end(FAILURE_GRACE, self._kill)

    def _kill(self) -> None:
        if not self._killed and self._running() and not self._hurried:
            logger.warning("killing %s", rank_list([rank.plan.rank for rank in self._running()]))
        self._killed = True
        processes.send(signal.SIGKILL, self._targets())
        self._plan_end(_KILL_WAIT, self._give_up)

    def _give_up(self) -> None:
        left = self._targets()
        logger.error(
            "pid %s did not die of SIGKILL: stuck in the kernel, look at the driver", ", ".join(map(str, left))
        )
        for rank in self._running():
            rank.code, rank.told = -signal.SIGKILL, True
        self._stuck = True

    def _tell(self, rank: _RunningRank, **message: Any) -> bool:
        """Tell the launcher that reads along; False if there is none. See [Note: messages] in protocol.py."""
        if self._relayed is None or not self._relayed.token:
            return False
        number = rank.plan.rank
        lines = encode(self._relayed.token, number, {"rank": number, "host": self._plan.host, **message})
        with self._locks[1 if os.path.sameopenfile(1, 2) else 2], suppress(OSError):  # nobody reads any more
            os.write(2, lines)
        return True

    def _verdict(self) -> int:
        self._on_verdicts()
        endings = [rank.ending() for rank in self._children]
        if self._first is not None:
            first = self._first.ending()
            others = [ending for ending in endings if ending.plan.rank != first.plan.rank]
            text = failure_report(first, others, self._plan.host)
            if not self._tell(self._first, kind="story", text=text):
                logger.error("%s", text)
            return processes.status(first.code)
        if self._signal is not None and any(ending.code != 0 for ending in endings):
            return 128 + self._signal if self._relayed is not None or self._retiring else self._stopped()
        return max((processes.status(ending.code) for ending in endings), default=0)


def main(control: int) -> int:
    """Run the plan that comes through the launcher's pipe."""
    return run_plan(Guard, control)


# ---- the report about a failed job: which rank is at fault or failed first, how, and the last it said

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
            text.append(
                f"  then, before it was told to stop, rank {other.plan.rank} {processes.describe_exit(other.code)}"
            )
    if told := [other.plan.rank for other in others if other.told]:
        text.append(f"  stopped because of this: {rank_list(told)}")
    return "\n".join(text)


def _how(ending: RankEnd) -> str:
    return f"{processes.describe_exit(ending.code)} after {ending.at:.1f} s"


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
