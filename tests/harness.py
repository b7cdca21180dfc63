"""Rank tests: `@ranks(2)` runs a test's body on forked processes that form one gloo group over a file store.

The ranks are forked by a server (`tests/forkserver.py`) that has torch loaded, one server per pytest process,
so a two-rank test costs a fork and a rendezvous, not an import. A failing rank's traceback, its local variables
and its output are shown with its number; a hang ends after `timeout` seconds with the stacks of all ranks.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Job:
    """One test body to run on `world` ranks."""

    file: str
    qualname: str
    kwargs: dict[str, Any]
    world: int
    timeout: float
    init: bool
    compiles: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: `kind` is passed, failed, skipped, died or hung."""

    rank: int
    kind: str
    text: str = ""
    output: str = ""
    order: float = 0.0


@dataclass
class Server:
    """The pytest side of the fork server: started on first use, ended with the process."""

    started: ClassVar[list[Server]] = []  # of this process, for `costs.py`

    process: subprocess.Popen[bytes] | None = None
    connection: Connection | None = None
    _closing: bool = field(default=False)

    def start(self) -> Connection:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        atexit.register(self.close)
        return self.connection

    def run(self, job: Job) -> list[Outcome]:
        if self.connection is None:
            self.started.append(self)
        connection = self.connection or self.start()
        connection.send_bytes(pickle.dumps(job))
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            status = self.process.wait() if self.process else None
            self.connection = self.process = None
            raise RuntimeError(f"the fork server ended with status {status} while it ran {job.qualname}") from None

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            self.process.wait(timeout=60)


SERVER = Server()


def ranks(
    *sizes: int, timeout: float = 300, init: bool = True, compiles: bool = False, shared: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the test on that many ranks, once per given size.

    With `compiles` the ranks are forked with torch's compiler loaded, which each of them would load for seconds. With
    `init=False` no process group is made: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_SIZE are set and
    `store_path()` names a file that all ranks of the test share, fit for `init_method=f"file://{store_path()}"`.
    With `shared` the tests of a file, for each size, follow one another in the same processes, of which each pays only
    once what the first engine takes: for tests that leave nothing behind that others of the file would notice.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**kwargs: Any) -> None:
            world = kwargs.pop("ranks_", sizes[0])
            file = inspect.getsourcefile(function)
            assert file is not None
            job = Job(os.path.abspath(file), function.__qualname__, kwargs, world, timeout, init, compiles, shared)
            _judge(SERVER.run(job))

        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        if len(sizes) > 1:
            parameters.append(inspect.Parameter("ranks_", inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks_", sizes)(run) if len(sizes) > 1 else run

    return decorate


shared_ranks = functools.partial(ranks, shared=True)


def store_path() -> str:
    """In a rank: a file path shared by all ranks of this test and by nobody else."""
    return os.environ["TEST_STORE"]


def _judge(outcomes: list[Outcome]) -> None:
    bad = [outcome for outcome in outcomes if outcome.kind not in ("passed", "skipped")]
    if bad:
        order = {"failed": 0, "died": 0, "hung": 1}
        bad.sort(key=lambda outcome: (order[outcome.kind], outcome.order))
        pytest.fail("\n\n".join(_describe(outcome) for outcome in bad), pytrace=False)
    skipped = [outcome for outcome in outcomes if outcome.kind == "skipped"]
    if skipped:
        pytest.skip(skipped[0].text)


def _describe(outcome: Outcome) -> str:
    parts = [f"=== rank {outcome.rank} {outcome.kind}", outcome.text.rstrip()]
    if outcome.output.strip():
        parts += [f"--- output of rank {outcome.rank}", outcome.output.rstrip()]
    return "\n".join(parts)
