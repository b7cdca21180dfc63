"""A small job, forked from a rank of the test server, in which one rank goes wrong; and what its ranks say.

The ranks meet with a long timeout first, so that a slow machine may take its time, and only then wait for short ones.
They end as programs do: an error is printed, then functions of `atexit` run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as td

from deepspeed import comm as dist
from deepspeed.comm.watch import HangSettings
from tests.harness import store_path

TIMEOUT = 2.0
LIMIT = 250.0  # seconds after which a test has failed
Fault = Callable[[int], None]


@dataclass(frozen=True)
class Said:
    """What a rank wrote, and how it ended: its exit status, or minus the signal; None if it had to be ended."""

    text: str
    status: int | None

    @property
    def error(self) -> str:
        """The message of the error that ended it: what stands after the name of its class in the last traceback."""
        return self.text.rpartition("CommError: ")[2]


def play(
    fault: Fault, world: int = 3, *, forever: Sequence[int] = (), settings: HangSettings | None = None
) -> list[Said]:
    """Let `fault(rank)` run on that many ranks; those of `forever` never end by themselves and are ended."""
    folder = Path(tempfile.mkdtemp(prefix="hanging-", dir=Path(store_path()).parent))  # which goes with the test
    known = replace(settings or HangSettings(timeout=TIMEOUT, patience=50.0), folder=folder)
    pids = [_fork(fault, rank, world, folder, known) for rank in range(world)]
    statuses: dict[int, int] = {}
    until = time.monotonic() + LIMIT
    while set(range(world)) - set(forever) - statuses.keys() and time.monotonic() < until:
        for rank in set(range(world)) - statuses.keys():
            found, status = os.waitpid(pids[rank], os.WNOHANG)
            if found:
                statuses[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for rank in set(range(world)) - statuses.keys():
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    return [Said((folder / f"out{rank}").read_text(errors="replace"), statuses.get(rank)) for rank in range(world)]


def _fork(fault: Fault, rank: int, world: int, folder: Path, settings: HangSettings) -> int:
    pid = os.fork()
    if pid:
        return pid
    die_with_parent()
    out = os.open(folder / f"out{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    status = 1
    try:
        _meet(rank, world, folder)
        dist.watch_hangs(settings)
        fault(rank)
        status = 0
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(status)


def die_with_parent() -> None:
    """No process outlives its test."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _meet(rank: int, world: int, folder: Path) -> None:
    """One gloo group over a store that rank 0 keeps, as in a job; every rank knows the others of its host."""
    limit, port = timedelta(seconds=LIMIT), folder / "port"
    if rank == 0:
        store = td.TCPStore("127.0.0.1", 0, world, True, limit, wait_for_workers=False)
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = td.TCPStore("127.0.0.1", int(port.read_text()), world, False, limit)
    td.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    dist.barrier()
    while len(dist.dispatcher.watch.neighbours) < world - 1:
        time.sleep(0.01)
    dist.barrier()


def linger() -> None:
    """Do something else for ever; the test ends it."""
    threading.Event().wait()
