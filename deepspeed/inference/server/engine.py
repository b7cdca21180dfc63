"""The process of an engine: commands come by a pipe, the tokens of each step leave by it as one message.

[Note: the pipe] A thread reads commands all the time, so the HTTP process, which writes them in its event loop, never
waits for a step. The engine ends when the pipe closes: however the HTTP process ends, no engine outlives it. Of several
ranks the first has the pipe; before each step it passes the commands to the others, which so take the same steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from deepspeed.errors import DeepSpeedError, printable
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.sequence import Token
from deepspeed.log import logger

_SETTLING = 2  # steps after a request ended, until its blocks are free and the statistics say so


class Submit(NamedTuple):
    """Generate; `request` is the number that tokens of it carry as their uid."""

    request: int
    prompt: Sequence[int]
    params: SamplingParams
    priority: int


class Cancel(NamedTuple):
    """Generate no more."""

    request: int


class Rejected(NamedTuple):
    """A request that the engine does not take, with an HTTP status."""

    request: int
    status: int
    message: str


class Ready(NamedTuple):
    """An engine that waits for commands, and what requests of it must keep to."""

    vocabulary: int
    context: int
    ends: frozenset[int]  # tokens that end a text


class Stepped(NamedTuple):
    """What one step brought."""

    events: list[Token]
    refused: list[Rejected]
    stats: dict[str, Any]


class Failed(NamedTuple):
    """An engine that could not be made, or cannot go on."""

    message: str


Command = Submit | Cancel


class TokenEngine(Protocol):
    """What the process needs of an engine; `LLM` is one."""

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0) -> int: ...

    def step(self) -> Sequence[Token]: ...

    def cancel(self, uid: int) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is made of, for each of its ranks."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    rank: int = 0
    ranks: int = 1
    device: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


EngineFactory = Callable[[EngineOptions], tuple[TokenEngine, Ready]]


class EngineLoop:
    """Applies commands to an engine and steps it."""

    def __init__(self, engine: TokenEngine) -> None:
        self.engine = engine
        self._uids: dict[int, int] = {}  # by request
        self._requests: dict[int, int] = {}  # by uid
        self._left: dict[int, int] = {}  # texts of a request that go on, by uid
        self._settling = 0

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._requests) or self._settling > 0

    def apply(self, commands: Sequence[Command]) -> list[Rejected]:
        """Begin and end requests; those that the engine does not take."""
        refused = []
        for command in commands:
            if isinstance(command, Cancel):
                uid = self._uids.get(command.request)
                if uid is not None:
                    self.engine.cancel(uid)
                    self._forget(uid)
                continue
            try:
                uid = self.engine.submit(command.prompt, command.params, priority=command.priority)
            except DeepSpeedError as error:
                refused.append(Rejected(command.request, 400, str(error)))
                continue
            self._uids[command.request], self._requests[uid] = uid, command.request
            self._left[uid] = command.params.n
        return refused

    def step(self) -> list[Token]:
        """The tokens that became known, of requests that are still open."""
        events = []
        self._settling -= 1
        for token in self.engine.step():
            request = self._requests.get(token.uid)
            if request is None:
                continue
            events.append(token._replace(uid=request))
            if token.finish_reason is not None:
                self._left[token.uid] -= 1
                if not self._left[token.uid]:
                    self._forget(token.uid)
        return events

    def _forget(self, uid: int) -> None:
        del self._uids[self._requests.pop(uid)]
        del self._left[uid]
        self._settling = _SETTLING


def run(
    options: EngineOptions, make: EngineFactory, connection: Connection, followers: Sequence[Connection] = ()
) -> None:
    """The whole life of the process of one rank; the first rank has connections to the others."""
    for each in (signal.SIGINT, signal.SIGTERM):  # for the HTTP process, which answers what runs first
        signal.signal(each, signal.SIG_IGN)
    os.dup2(2, 1)  # the HTTP process writes its address to stdout, and nothing else belongs there
    os.environ.update(options.environment)
    try:
        engine, ready = make(options)
    except Exception as error:  # noqa: BLE001  # of a model, a device or a library; the HTTP process says it
        if not isinstance(error, DeepSpeedError):
            logger.exception("the engine could not be made")
        _send(connection, Failed(f"{type(error).__name__}: {printable(error, 2000)}"))
        sys.exit(1)
    loop = EngineLoop(engine)
    try:
        if options.rank == 0:
            lead(connection, loop, ready, followers)
        else:
            _follow(connection, loop)
    except Exception as error:  # noqa: BLE001  # every request of this engine fails; the HTTP process answers them
        logger.exception("the engine failed")
        _send(connection, Failed(f"{type(error).__name__}: {printable(error, 2000)}"))
        os._exit(1)  # other ranks may wait for this one for ever
    engine.close()


def make_llm(options: EngineOptions) -> tuple[TokenEngine, Ready]:
    """An `LLM` on this rank's device."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.generate.llm import LLM

    get_accelerator().set_device(options.device)
    config = dict(options.config)
    if options.ranks > 1:
        comm.init_distributed()
        config["tensor_parallel"] = {"tp_size": options.ranks}
    llm = LLM(options.model, config, dtype=options.dtype)
    parts = llm._parts
    return _WithoutText(llm), Ready(parts.vocabulary, parts.context, parts.eos_ids)


class _WithoutText:
    """An `LLM` that makes no text, which the HTTP process does; only a schema needs its tokenizer."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._tokenizer = llm, llm.tokenizer
        self.step, self.cancel, self.stats, self.close = llm.step, llm.cancel, llm.stats, llm.close

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0) -> int:
        self._llm.tokenizer = None if params.schema is None else self._tokenizer
        uid: int = self._llm.submit(prompt, params, priority=priority)
        return uid


def lead(connection: Connection, loop: EngineLoop, ready: Ready, followers: Sequence[Connection] = ()) -> None:
    """Serve the commands of a connection until it closes."""
    commands: SimpleQueue[Command | None] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), name="commands", daemon=True).start()
    _send(connection, ready)
    while True:
        batch = _waiting(commands, block=not loop.busy)
        if batch is None:
            return
        for follower in followers:
            follower.send(batch)
        refused = loop.apply(batch)
        events = loop.step()
        if not _send(connection, Stepped(events, refused, loop.engine.stats())):
            return


def _follow(connection: Connection, loop: EngineLoop) -> None:
    while True:
        try:
            batch = connection.recv()
        except EOFError:
            return
        loop.apply(batch)
        loop.step()


def _read(connection: Connection, commands: SimpleQueue[Command | None]) -> None:
    try:
        while True:
            commands.put(connection.recv())
    except (EOFError, OSError):
        commands.put(None)


def _waiting(commands: SimpleQueue[Command | None], *, block: bool) -> list[Command] | None:
    """The commands that came since the last call; None once the pipe is closed."""
    found: list[Command] = []
    try:
        while True:
            command = commands.get(block=block and not found)
            if command is None:
                return None
            found.append(command)
    except Empty:
        return found


def _send(connection: Connection, message: object) -> bool:
    """Whether the other end still listens."""
    try:
        connection.send(message)
    except OSError:
        return False
    return True
