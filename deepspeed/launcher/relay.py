"""The relay: runs the programs that reach other hosts, reads what the ranks tell, and stops all hosts when one fails.

Below it run one ssh for each host, or one pdsh, mpirun or srun. The guard of each host tells of a failure at once; see
[Note: messages]. The first message decides which rank failed first, because hosts take different times to end after it.

[Note: beats] The far end of an ssh notices by the end of its stdin that the relay is gone. Where the network is cut
instead, nothing ends; so a byte goes there now and then, and silence means the same. ssh does so in our direction.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.launcher import processes
from deepspeed.launcher.output import HostOutput, OutputPipe
from deepspeed.launcher.process_loop import FAILURE_GRACE, SIGNAL_GRACE, TICK, Child, ProcessLoop, run_plan
from deepspeed.launcher.protocol import Link, MessageReader, RelayPlan
from deepspeed.launcher.supervise import BEAT
from deepspeed.log import logger

_SSH_FAILED = 255
_BEAT_EVERY = 15.0
_SLACK = 5.0  # seconds that a host gets beyond what its own guard takes
_DRAIN = 2.0  # seconds until the output of a program that has ended counts as read
_LONGEST = 16  # times the first wait for a host that stays away
_ORPHAN_GRACE = 3.0  # seconds that programs get to end after the launcher was killed


@dataclass(kw_only=True)
class RunningLink(Child):
    """A started link; `failed` means that a rank's failure came through it."""

    link: Link
    waiting: bytearray  # for its stdin
    judged: bool = False
    failed: bool = False

    def drained(self) -> bool:
        """Whether everything that it wrote was read; something below it may keep the pipes open."""
        return not any(channel.busy() for channel in self.channels) or time.monotonic() > self.at + _DRAIN


class Relay(ProcessLoop[RunningLink]):
    """Runs the links of a job that ends with its first failure."""

    def __init__(self, plan: RelayPlan, control: int) -> None:
        super().__init__(control, plan.pid_file)
        self._plan = plan
        self._failures: list[dict[str, Any]] = []  # that ranks reported, in the order of arrival
        self._reports: dict[int, str] = {}  # of the guards of these ranks
        self._lost: RunningLink | None = None  # a link that ended badly, and no rank said why
        self._wake_read, self._wake_write = os.pipe()
        self._inbox: deque[tuple[RunningLink, dict[str, Any]]] = deque()
        self._printer = HostOutput(plan)
        self._next_beat = time.monotonic() + _BEAT_EVERY
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: os.read(self._wake_read, 4096))

    # ---- starting

    def _start(self) -> str | None:
        arm = processes.end_with_parent(signal.SIGTERM)
        for link in self._plan.links:
            try:
                self._children.append(self._spawn(link, arm))
            except (OSError, subprocess.SubprocessError) as error:
                return f"{link.name}: {link.command[0]} could not be started: {error}"
        self._start_output()
        return None

    def _spawn(self, link: Link, arm: Callable[[], None]) -> RunningLink:
        reader = MessageReader(self._plan.token)
        running: list[RunningLink] = []

        def shape(target: int, data: bytes) -> bytes:
            kept, messages = reader.split(data)
            self._inbox.extend((running[0], message) for message in messages)
            if messages:
                os.write(self._wake_write, b".")
            return self._printer.shaped(link, target, kept)

        channels = [
            OutputPipe(target, self._stop_read, self._printer.locks[target], partial(shape, target))
            for target in (1, 2)
        ]
        process = subprocess.Popen(
            list(link.command),
            stdin=subprocess.PIPE if link.opening else subprocess.DEVNULL,
            stdout=channels[0].inlet,
            stderr=channels[1].inlet,
            start_new_session=True,
            preexec_fn=arm,
        )
        running.append(RunningLink(process=process, channels=channels, link=link, waiting=bytearray()))
        if link.opening:
            assert process.stdin is not None, "it was asked for"
            os.set_blocking(process.stdin.fileno(), False)
            self._say(running[0], link.opening)
        return running[0]

    # ---- talking to the far ends

    def _say(self, each: RunningLink, data: bytes) -> None:
        """Write to a link's stdin, later if it does not take it now."""
        stdin = each.process.stdin
        if stdin is None or stdin.closed:
            return
        if not each.waiting:
            self._selector.register(stdin, selectors.EVENT_WRITE, partial(self._write, each))
        each.waiting += data

    def _write(self, each: RunningLink) -> None:
        assert each.process.stdin is not None, "only those are registered"
        try:
            done = os.write(each.process.stdin.fileno(), each.waiting)
            del each.waiting[:done]
        except BlockingIOError:
            return
        except OSError:  # it has ended: its exit status will tell
            each.waiting.clear()
        if not each.waiting:
            self._selector.unregister(each.process.stdin)

    def _hang_up(self, each: RunningLink) -> None:
        """Let a link end: the far end notices that its stdin is closed, or the program is told."""
        if each.process.stdin is None:
            processes.send(signal.SIGTERM, [each.process.pid])
        self._close_stdin(each)

    def _close_stdin(self, each: RunningLink) -> None:
        stdin = each.process.stdin
        if stdin is not None and not stdin.closed:
            if each.waiting:
                self._selector.unregister(stdin)
                each.waiting.clear()
            stdin.close()

    # ---- waiting

    def _wait(self) -> None:
        while any(not each.judged for each in self._children):
            self._turn()
        os.close(self._stop_write)
        self._printer.close()
        processes.send(signal.SIGKILL, processes.descendants(os.getpid()))  # what a program left on this host

    def _turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_EVERY
            for each in self._running():
                self._say(each, bytes([BEAT]))
        ended = any(each.code is not None and not each.judged for each in self._children)
        wait = TICK if ended else max(0.0, min(self._dues()) - now)
        for key, _ in self._selector.select(wait):
            key.data()
        for each in self._running():
            code = each.process.poll()
            if code is not None:
                each.code, each.at = code, time.monotonic()
        while self._inbox:
            self._on_message(*self._inbox.popleft())
        for each in self._children:
            if each.code is not None and not each.judged and each.drained() and not self._inbox:
                self._judge(each, each.code)
        self._do_due()

    def _dues(self) -> list[float]:
        """When something has to be done even if nothing happens."""
        return [self._next_beat, *(due for due, _ in self._agenda[:1])]

    def _on_message(self, each: RunningLink, message: dict[str, Any]) -> None:
        rank, kind = message.get("rank"), message.get("kind")
        if not isinstance(rank, int) or kind not in ("failed", "story"):
            return  # a rank that prints lines of this job's token, for fun
        if kind == "story":
            self._reports[rank] = str(message.get("text"))
            if self._failures and self._failures[0]["rank"] == rank and not each.link.opening:
                self._plan_end(0.0, self._end)  # nothing more is to be expected of it
            return
        each.failed = True
        code = message.get("code")
        message = {"rank": rank, "host": message.get("host"), "code": code if isinstance(code, int) else 1}
        self._failures.append({**message, "told": self._stopping or self._signal is not None})
        self._fail(each)

    def _judge(self, each: RunningLink, code: int) -> None:
        """A link has ended, and all its output was read."""
        each.judged = True
        self._close_stdin(each)
        if self._plan.independent:
            if code != 0:
                logger.error("%s: %s %s", each.link.name, each.link.command[0], processes.describe_exit(code))
            return
        told = self._stopping or self._signal is not None
        if code != 0 and not each.failed and not told and self._lost is None:
            self._lost = each
            self._fail(each)

    def _fail(self, culprit: RunningLink) -> None:
        if self._stopping or self._signal is not None:
            return
        self._stopping = True
        for each in self._running():
            if each is not culprit:
                self._say(each, bytes([signal.SIGTERM]))
        self._plan_end(FAILURE_GRACE + _SLACK, self._end)

    # ---- signals

    def _on_orphaned(self) -> None:
        logger.error("the launcher was killed: ending the ranks on all hosts")
        self._signal = self._signal or signal.SIGKILL
        self._end(_ORPHAN_GRACE)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGWINCH:
            return
        for each in self._running():
            if each.link.opening:
                self._say(each, bytes([number]))
            elif each.link.forwards:
                processes.send(number, [each.process.pid])
            else:
                name = signal.Signals(number).name
                logger.warning("%s is not passed on: %s cannot; --launcher ssh can", name, each.link.name)

    def _on_stop(self, number: int) -> None:
        if self._signal is None and not self._stopping:
            self._signal = number
            logger.warning("%s: passed on to all hosts", signal.Signals(number).name)
            for each in self._running():
                if each.link.opening:
                    self._say(each, bytes([number]))
                else:
                    self._hang_up(each)
            self._plan_end(SIGNAL_GRACE + _SLACK, self._end)
        elif number == signal.SIGINT:  # the user insists
            self._end(_ORPHAN_GRACE)

    # ---- ending

    def _end(self, grace: float = FAILURE_GRACE + _SLACK) -> None:
        for each in self._running():
            self._hang_up(each)
        self._plan_end(grace, self._kill)

    def _kill(self) -> None:
        names = ", ".join(each.link.name for each in self._running())
        if names and not self._killed:
            logger.warning("%s: not ending, so the connection is cut", names)
        self._killed = True
        own = [each.process.pid for each in self._running()]
        processes.send(signal.SIGKILL, {*own, *processes.descendants(os.getpid())})
        self._plan_end(TICK, self._kill)

    def _verdict(self) -> int:
        if self._signal is None and self._failures and (self._lost is None or not self._failures[0]["told"]):
            first, *others = self._failures
            report = self._reports.get(first["rank"])
            text = [report or f"rank {first['rank']} failed first: it {processes.describe_exit(first['code'])}"]
            text += [
                f"  then, on host {each['host']}, rank {each['rank']} {processes.describe_exit(each['code'])}"
                for each in others
                if not each["told"]
            ]
            logger.error("%s", "\n".join(text))
            return processes.status(first["code"])
        if self._lost is not None:
            return self._lost_status(self._lost)
        codes = [each.code or 0 for each in self._children]
        if self._signal is not None and any(codes):
            return self._stopped()
        return max((processes.status(code) for code in codes), default=0)

    def _lost_status(self, lost: RunningLink) -> int:
        """Say that a host could not be reached, or that its ranks never came to start; the exit status."""
        code, program = lost.code or 0, Path(lost.link.command[0]).name
        text = [f"{lost.link.name}: {program} {processes.describe_exit(code)}, and no rank there told of a failure"]
        if program == "ssh" and code == _SSH_FAILED:
            host = lost.link.host
            text.append(f"  hint:    the host was not reached, or the connection broke; try: ssh {host} true")
        if lines := lost.channels[1].tail.lines():
            text += ["  its last lines (stderr):", *(f"    | {line}" for line in lines)]
        logger.error("%s", "\n".join(text))
        return processes.status(code)


class ElasticRelay(Relay):
    """Runs one link for each host; the job goes on as long as one of them is there, and a lost one is tried again.

    What ranks do is told by the agents on the hosts, which meet without the relay; see [Note: rounds] in
    elasticity/elastic_agent.py. An agent that ends by itself has a word about the whole job, an ssh that ends has not.
    """

    def __init__(self, plan: RelayPlan, control: int) -> None:
        super().__init__(plan, control)
        self._absent: dict[str, tuple[float, Link]] = {}  # lost hosts, or never reached, and when they are tried again
        self._waits: dict[str, float] = {}  # which grow with every attempt
        self._status: int | None = None  # with which an agent ended the job
        self._arm = processes.end_with_parent(signal.SIGTERM)

    def _turn(self) -> None:
        now = time.monotonic()
        for link in [link for due, link in self._absent.values() if due <= now]:
            del self._absent[link.host]
            logger.info("host %s is tried again", link.host)
            # Between fork and exec the child only calls what was loaded before, so that our threads do not matter.
            again = self._spawn(link, self._arm)
            self._children.append(again)
            for channel in again.channels:
                channel.start()
        super()._turn()

    def _dues(self) -> list[float]:
        return [*super()._dues(), *(due for due, _ in self._absent.values())]

    def _on_message(self, each: RunningLink, message: dict[str, Any]) -> None:
        """Guards of an elastic job send none: this is a rank that prints lines of this job's token, for fun."""

    def _judge(self, each: RunningLink, code: int) -> None:
        each.judged = True
        self._close_stdin(each)
        if self._status is not None or self._signal is not None:
            return
        if 0 <= code != _SSH_FAILED:
            self._status = code
            self._absent.clear()
            if code == 0:  # which an agent says when all ranks have ended; the others have the same to say
                self._plan_end(FAILURE_GRACE + _SLACK, self._end)
            else:
                self._fail(each)
            return
        if not self._running():
            self._lost = each
            return
        host = each.link.host
        wait = self._waits.get(host, self._plan.again)
        self._waits[host] = min(2 * wait, _LONGEST * self._plan.again)
        self._absent[host] = (time.monotonic() + wait, each.link)
        logger.warning(
            "host %s is lost (%s %s): the job goes on without it, and it is tried again in %.0f s",
            *(host, each.link.command[0], processes.describe_exit(code), wait),
        )

    def _on_stop(self, number: int) -> None:
        self._absent.clear()
        super()._on_stop(number)

    def _verdict(self) -> int:
        if self._signal is not None and any(each.code for each in self._children):
            return self._stopped()
        if self._status is not None:
            return self._status
        return 0 if self._lost is None else self._lost_status(self._lost)


def main(control: int) -> int:
    """Run the plan that comes through the launcher's pipe."""
    return run_plan(lambda plan, pipe: (ElasticRelay if plan.elastic else Relay)(plan, pipe), control)
