"""`Replica`: one engine as the HTTP process sees it, and `Ticket`: the tokens of one HTTP request."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Any

from deepspeed.errors import DeepSpeedError
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.sequence import Token
from deepspeed.inference.server.engine import (
    Cancel,
    EngineFactory,
    EngineOptions,
    Failed,
    Ready,
    Stepped,
    Submit,
    run,
)
from deepspeed.inference.server.metrics import Metrics
from deepspeed.inference.server.refusal import RequestRefused
from deepspeed.launcher.ports import free_port
from deepspeed.log import logger

_PATIENCE = 10.0  # seconds that an engine has to end by itself


class EngineLost(DeepSpeedError):
    """A process of an engine ended, or never became ready."""


class Ticket:
    """Collects the tokens of one HTTP request until its answer takes them; a slow reader gets several at a time."""

    def __init__(self) -> None:
        self.created = monotonic()
        self.last: dict[tuple[int, int], float] = {}  # when the newest token of a text came
        self._events: list[Token] = []
        self._failure: RequestRefused | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: Token) -> None:
        """A token came."""
        self._events.append(event)
        self._wake()

    def fail(self, failure: RequestRefused) -> None:
        """No more tokens come, because of this."""
        self._failure = self._failure or failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Token]:
        """The tokens that came since the last call, at least one."""
        while not self._events:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found, self._events = self._events, []
        return found


class Replica:
    """Starts an engine, passes requests to it and hands out its tokens, all in the event loop of the HTTP process."""

    def __init__(
        self,
        number: int,
        connection: Connection,
        processes: Sequence[SpawnProcess],
        metrics: Metrics,
        numbers: Iterator[int],
    ) -> None:
        """`numbers`: for requests; engines that share a ticket share them."""
        self.number = number
        self.stats: dict[str, Any] = {}
        self.lost: str | None = None
        self._connection = connection
        self._processes = processes
        self._metrics = metrics
        self._numbers = numbers
        self._requests: dict[int, tuple[Ticket, int]] = {}  # ticket, texts that go on
        self._unstarted: set[int] = set()
        self._on_loss: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def start(
        cls, number: int, options: EngineOptions, make: EngineFactory, metrics: Metrics, numbers: Iterator[int]
    ) -> Replica:
        """Start the processes of an engine; `ready` waits for them."""
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(options.ranks)]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(options.ranks)}
        followers = [ours for ours, _ in pipes[1:]]
        processes = []
        for rank, (_, theirs) in enumerate(pipes):
            place = {} if options.ranks == 1 else {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            own = replace(options, rank=rank, device=options.device + rank, environment=place)
            words = (own, make, theirs, followers if rank == 0 else ())
            processes.append(context.Process(target=run, args=words, name=f"engine {number} rank {rank}"))
            processes[-1].start()
        for connection in (*followers, *(theirs for _, theirs in pipes)):
            connection.close()  # the ends of other processes: a pipe closes with the process that has it
        return cls(number, pipes[0][0], processes, metrics, numbers)

    def ready(self) -> Ready:
        """Wait until the engine can take requests."""
        wait([self._connection, *(process.sentinel for process in self._processes)])
        try:
            message = self._connection.recv() if self._connection.poll() else Failed(self._ends())
        except EOFError:
            message = Failed(self._ends())
        if isinstance(message, Ready):
            return message
        self.close()
        raise EngineLost(f"engine {self.number} could not start: {message.message}")

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Handle what the engine sends in this event loop; `on_loss` is called when one of its processes ended."""
        self._on_loss = on_loss
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection.fileno(), self._receive)
        for process in self._processes:
            self._loop.add_reader(process.sentinel, self._lose)

    def _ignore(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for source in (self._connection.fileno(), *(process.sentinel for process in self._processes)):
                self._loop.remove_reader(source)

    @property
    def load(self) -> int:
        """Requests that are open."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return len(self._unstarted)

    def submit(self, ticket: Ticket, prompt: Sequence[int], params: SamplingParams, priority: int) -> int:
        """Begin a request; its tokens go to the ticket, with the number that is returned."""
        if self.lost is not None:
            raise self._unavailable()
        number = next(self._numbers)
        self._requests[number] = (ticket, params.n)
        self._unstarted.add(number)
        self._send(Submit(number, prompt, params, priority))
        return number

    def cancel(self, number: int) -> None:
        """End a request if it is still open."""
        if self._requests.pop(number, None) is not None:
            self._unstarted.discard(number)
            self._send(Cancel(number))

    def _send(self, command: Submit | Cancel) -> None:
        try:
            self._connection.send(command)
        except OSError:  # the engine ended; its sentinel says so next
            logger.debug("engine %d is gone", self.number)

    def _receive(self) -> None:
        try:
            while self._connection.poll():
                self._handle(self._connection.recv())
        except (EOFError, OSError):
            self._lose()

    def _handle(self, message: Stepped | Failed) -> None:
        if isinstance(message, Failed):
            self.lost = message.message
            return
        now = monotonic()
        self.stats = message.stats
        for refused in message.refused:
            ticket, _ = self._requests.pop(refused.request, (None, 0))
            self._unstarted.discard(refused.request)
            if ticket is not None:
                retry = self._metrics.retry_after(self.waiting) if refused.status == 429 else None
                ticket.fail(RequestRefused(refused.status, refused.message, retry_after=retry))
        for event in message.events:
            entry = self._requests.get(event.uid)
            if entry is None:  # cancelled
                continue
            ticket, left = entry
            self._unstarted.discard(event.uid)
            self._measure(ticket, event, now)
            ticket.push(event)
            if event.finish_reason is not None:
                if left == 1:
                    del self._requests[event.uid]
                else:
                    self._requests[event.uid] = (ticket, left - 1)

    def _measure(self, ticket: Ticket, event: Token, now: float) -> None:
        key = event.uid, event.index
        before = ticket.last.get(key)
        if before is None:
            self._metrics.first_token.add(now - ticket.created)
        else:
            self._metrics.between_tokens.add(now - before)
        ticket.last[key] = now

    def _unavailable(self) -> RequestRefused:
        return RequestRefused(503, "the engine of this request ended; the server stops", code="engine_lost")

    def _lose(self) -> None:
        self._ignore()
        try:  # what it wrote before it ended
            while self._connection.poll():
                self._handle(self._connection.recv())
        except (EOFError, OSError):
            logger.debug("engine %d wrote nothing more", self.number)
        self.lost = self.lost or self._ends()
        logger.error("engine %d ended: %s", self.number, self.lost)
        self.kill()
        failed, self._requests = self._requests, {}
        self._unstarted.clear()
        for ticket, _ in failed.values():
            ticket.fail(self._unavailable())
        self._on_loss()

    def _ends(self) -> str:
        for process in self._processes:
            process.join(0.5)
            if process.exitcode is not None:
                code = process.exitcode
                return f"{process.name} ended " + (f"by signal {-code}" if code < 0 else f"with exit code {code}")
        return "its pipe closed"

    def close(self) -> None:
        """End the engine: by itself within a moment, else by a signal."""
        self._ignore()
        self._connection.close()
        until = monotonic() + _PATIENCE
        for process in self._processes:
            process.join(max(0.0, until - monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every process of the engine."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
