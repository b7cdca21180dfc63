"""torch's elastic agent with the launcher's guard below it: one on every host of an elastic job.

[Note: rounds] A round begins when torch's rendezvous has numbered the agents of the hosts, and each has started its
ranks below a guard. It ends when ranks fail, a host wants to join, or one falls silent: all ranks are ended and the
agents meet again. The script starts anew, with the ranks that there are now, and continues from its checkpoint. Only
failures count against the limit.

Silence is noticed in a ring, so that the cost does not grow with the number of hosts: each agent counts up a number in
the store and watches that of its neighbour. An agent that notices silence goes to the next rendezvous, and that the
others see.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, cast

from torch.distributed import DistError, DistStoreError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from deepspeed.launcher.ports import claim_port
from deepspeed.launcher.process_loop import STOPPING
from deepspeed.launcher.protocol import RETIRE, NodePlacement, NodePlan
from deepspeed.launcher.supervise import Supervision
from deepspeed.log import logger

SILENCE = 20.0  # seconds without a beat until a host counts as gone
_BEAT_EVERY = 1.0
_LOOK_PER_HOST = 0.01  # seconds between looks at the rendezvous, whose state grows with the number of hosts
_GOODBYE = 5.0  # seconds that whoever keeps the store waits for others to have read its end

MakePlan = Callable[[NodePlacement], NodePlan]


class Stopped(Exception):
    """A signal that ends the job came while no rank ran."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class GuardedAgent(SimpleElasticAgent):
    """Runs the ranks of this host, round after round; `status` is the exit status once `run` has returned.

    `make_plan` plans the ranks of a place, `usable` says how many ranks of so many can train together. `job` is a store
    for the end of the job, which hosts outside of the last round see, too. `keeps_store`: the others need this process
    until they have ended.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        make_plan: MakePlan,
        environment: Mapping[str, str],
        *,
        usable: Callable[[int], int] = lambda ranks: ranks,
        job: Store | None = None,
        keeps_store: bool = False,
        exit_barrier_timeout: float = 300.0,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout)
        self.status = 0
        self._make_plan, self._environment = make_plan, environment
        self._usable, self._job, self._keeps_store = usable, job, keeps_store
        self._guard: Supervision | None = None
        self._ended: int | None = None  # exit status of this round's ranks
        self._stopped: int | None = None  # the signal that ends the job
        self._meeting = False
        self._port = ExitStack()
        self._beats: tuple[int, float] = (0, 0.0)  # of the neighbour: the last number, and when it was new
        self._next_beat = self._next_look = 0.0
        self._done_since: float | None = None

    def on_signal(self, number: int) -> None:
        """Pass a signal on to the ranks; one that ends the job is remembered. For handlers of signals."""
        if number in STOPPING:
            self._stopped = self._stopped or number
            if self._meeting:
                raise Stopped(number)
        if self._guard is not None:
            self._guard.tell(number)

    # ---- what torch's agent asks for

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meeting = True
        try:
            if self._stopped is not None:
                raise Stopped(self._stopped)
            super()._rendezvous(worker_group)
        finally:
            self._meeting = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        total = worker_group.workers[0].world_size
        world = self._usable(total)
        own = [worker for worker in worker_group.workers if worker.global_rank < world]
        if world < total:
            logger.warning("%d of %d ranks are used: the elastic batch does not run on all of them", world, total)
        self._ended, self._done_since = None, None
        self._beats, self._next_beat = (0, time.monotonic()), 0.0
        node, nodes = _node(worker_group)
        master = self._master(worker_group)
        if not own:
            self._ended = 0
            return {}
        first = own[0].global_rank
        place = NodePlacement(first=first, local=len(own), world=world, node=node, nodes=nodes, master=master)
        self._guard = Supervision(self._make_plan(place), self._variables(), without_stdin=True)
        if self._stopped is not None:
            self._guard.tell(self._stopped)
        return {worker.local_rank: worker.global_rank for worker in own}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._guard is not None:
            self._guard.tell(RETIRE)
            self._guard.wait()
            self._let_go()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of this host's ranks, after waiting a moment for their end."""
        interval = worker_group.spec.monitor_interval
        if self._guard is None:
            time.sleep(interval)
        else:
            self._ended = self._guard.wait(interval)
            if self._ended is not None:
                self._let_go()
        if self._ended is None:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.FAILED if self._ended else WorkerState.SUCCEEDED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._port.close()
        self._stop_workers(self._worker_group)

    def _let_go(self) -> None:
        assert self._guard is not None, "asked before"
        self._guard.close()
        self._guard = None

    def _master(self, worker_group: WorkerGroup) -> tuple[str, int]:
        """Where rank 0 of this round waits for the others: its host chooses, and tells."""
        store = _store(worker_group)
        self._port.close()
        if _node(worker_group)[0] == 0:
            address = worker_group.spec.local_addr or socket.getfqdn()
            port = self._port.enter_context(claim_port(0))
            store.set("master", f"{address} {port}")
            return address, port
        address, _, text = store.get("master").decode().rpartition(" ")
        return address, int(text)

    def _variables(self) -> dict[str, str]:
        spec = self._worker_group.spec
        told = {  # as torchrun calls them; scripts look for them to know that they were restarted
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        }
        return {**self._environment, **told}

    # ---- rounds

    def _invoke_run(self, role: str = "") -> RunResult:
        try:
            return self._rounds(self._worker_group)
        except RendezvousClosedError:  # another host has ended the job
            status = self._told_status()
            self._leave()
            return self._result(status)

    def _rounds(self, group: WorkerGroup) -> RunResult:
        self._form(self._initialize_workers)
        while True:
            state = self._monitor_workers(group).state
            if self._stopped is not None and state is not WorkerState.HEALTHY:
                return self._result(self._ended or 0)  # this host leaves, and others may go on
            if state is WorkerState.FAILED:
                if self._remaining_restarts == 0:
                    logger.error("the limit of %d restarts is reached: the job ends", group.spec.max_restarts)
                    self._end_for_all(self._ended or 1)
                    return self._result(self._ended or 1)
                self._remaining_restarts -= 1
                used = group.spec.max_restarts - self._remaining_restarts
                logger.warning("restart %d of %d", used, group.spec.max_restarts)
                self._form(self._restart_workers)
            elif state is WorkerState.SUCCEEDED and self._all_done():
                return self._result(0)
            elif (reason := self._disturbance()) is not None:
                logger.warning("%s: the ranks end, and the hosts meet again", reason)
                self._form(self._restart_workers)

    def _form(self, begin: Callable[[WorkerGroup], None]) -> None:
        """Meet the other hosts and start the ranks; a host that vanishes meanwhile makes a further attempt of it."""
        while True:
            try:
                begin(self._worker_group)
                return
            except DistStoreError:  # it did not say what it had to, and the time is up
                logger.warning("a host was lost while the job was formed: the hosts meet again")

    def _disturbance(self) -> str | None:
        """Why the round has to end, if it has to; and the beat of this host."""
        own, hosts = _node(self._worker_group)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + max(_BEAT_EVERY, hosts * _LOOK_PER_HOST)
            handler = self._worker_group.spec.rdzv_handler
            if handler.is_closed():
                raise RendezvousClosedError
            if handler.num_nodes_waiting() > 0:
                return "a host has come, or begins again"
        if hosts == 1 or now < self._next_beat:
            return None
        self._next_beat = now + _BEAT_EVERY
        store, neighbour = _store(self._worker_group), (own + 1) % hosts
        store.add(f"beat/{own}", 1)
        heard = store.add(f"beat/{neighbour}", 0)
        if heard != self._beats[0]:
            self._beats = (heard, now)
        elif now - self._beats[1] > SILENCE:
            return f"host {neighbour} of {hosts} has not been heard of for {SILENCE:.0f} s"
        return None

    def _all_done(self) -> bool:
        """Whether the ranks of all hosts have ended well; until then this host may be needed again."""
        store, hosts = _store(self._worker_group), _node(self._worker_group)[1]
        try:
            if self._done_since is None:
                self._done_since = time.monotonic()
                store.add("done", 1)
            if store.add("done", 0) < hosts:
                return time.monotonic() - self._done_since > self._exit_barrier_timeout
        except DistError:
            logger.debug("whoever keeps the store has left, as it does when all have ended")
            return True
        self._end_for_all(0)
        return True

    # ---- the end

    def _end_for_all(self, status: int) -> None:
        """Let every host know that the job has ended, and how; also one that is about to come."""
        with suppress(DistError, RendezvousError):
            if self._job is not None:
                self._job.set("status", str(status))
            self._worker_group.spec.rdzv_handler.shutdown()
        self._leave()

    def _leave(self) -> None:
        """Need the store no more; whoever keeps it gives the others a moment to do the same."""
        store = cast("Store | None", self._worker_group.store)
        if store is None:  # this host was never part of a round
            return
        hosts = _node(self._worker_group)[1]
        until = time.monotonic() + _GOODBYE
        with suppress(DistError):
            store.add("left", 1)
            while self._keeps_store and store.add("left", 0) < hosts and time.monotonic() < until:
                time.sleep(0.02)

    def _result(self, status: int) -> RunResult:
        self.status = status
        if status:
            return RunResult(WorkerState.FAILED)
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _told_status(self) -> int:
        """The status with which another host ended the job; else that of this host's last failure."""
        with suppress(DistError):
            if self._job is not None and self._job.check(["status"]):
                return int(self._job.get("status"))
        return self._ended or 1


# torch declares what a rendezvous sets as what it is before the first one.


def _store(worker_group: WorkerGroup) -> Store:
    """The store of this round."""
    return cast("Store", worker_group.store)


def _node(worker_group: WorkerGroup) -> tuple[int, int]:
    """The number of this host in this round, and how many there are."""
    return cast("int", worker_group.group_rank), cast("int", worker_group.group_world_size)
