"""The relay of an elastic job: a host that is lost is no end, and is tried again while others work.

What ranks do is told by the agents on the hosts, which meet without the relay; see [Note: rounds] in
elasticity/agent.py. An agent that ends by itself has a word about the whole job, an ssh that ends has not.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

from deepspeed.launcher import processes
from deepspeed.launcher.guard import FAILURE_GRACE
from deepspeed.launcher.relay import Relay, Running, start
from deepspeed.launcher.relay_plan import Link, RelayPlan
from deepspeed.launcher.verdict import Loss, lost
from deepspeed.log import logger

__all__ = ["ElasticRelay", "main"]

_SSH_FAILED = 255
_SLACK = 5.0  # seconds that the agents of other hosts get once one has ended
_LONGEST = 16  # times the first wait for a host that stays away


@dataclass
class _Absent:
    """A host that was lost, or never reached, and when it is tried again."""

    link: Link
    due: float


class ElasticRelay(Relay):
    """Runs a plan with one link for each host; the job goes on as long as one of them is there."""

    def __init__(self, plan: RelayPlan, control: int) -> None:
        super().__init__(plan, control)
        self._absent: dict[str, _Absent] = {}
        self._waits: dict[str, float] = {}  # which grow with every attempt
        self._status: int | None = None  # with which an agent ended the job
        self._arm = processes.end_with_parent(signal.SIGTERM)

    def _turn(self) -> None:
        now = time.monotonic()
        for absent in [each for each in self._absent.values() if each.due <= now]:
            del self._absent[absent.link.host]
            logger.info("host %s is tried again", absent.link.host)
            # Between fork and exec the child only calls what was loaded before, so that our threads do not matter.
            again = self._spawn(absent.link, self._arm)
            self._links.append(again)
            for channel in again.channels:
                channel.start()
        super()._turn()

    def _dues(self) -> list[float]:
        return [*super()._dues(), *(each.due for each in self._absent.values())]

    def _on_message(self, each: Running, message: dict[str, Any]) -> None:
        """Guards of an elastic job send none: this is a rank that prints lines of this job's token, for fun."""

    def _judge(self, each: Running, code: int) -> None:
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
        loss = Loss(each.link.host, tuple(each.link.command), code, each.channels[1].tail.lines())
        if not self._running():
            self._lost = loss
            return
        wait = self._waits.get(each.link.host, self._plan.again)
        self._waits[each.link.host] = min(2 * wait, _LONGEST * self._plan.again)
        self._absent[each.link.host] = _Absent(each.link, time.monotonic() + wait)
        what = processes.described(code)
        logger.warning(
            "host %s is lost (%s %s): the job goes on without it, and it is tried again in %.0f s",
            *(each.link.host, each.link.command[0], what, wait),
        )

    def _on_stop(self, number: int) -> None:
        self._absent.clear()
        super()._on_stop(number)

    def _verdict(self) -> int:
        if self._signal is not None and any(each.code for each in self._links):
            logger.error("the job was stopped by %s", signal.Signals(self._signal).name)
            return 128 + self._signal
        if self._status is not None:
            return self._status
        if self._lost is not None:
            logger.error("%s", lost(self._lost))
            return processes.status(self._lost.code)
        return 0


def main(control: int) -> int:
    """The relay of a job that goes on."""
    return start(ElasticRelay, control)
