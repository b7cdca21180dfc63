"""The process that forks ranks: torch is loaded, no tensor operation runs in it, one pytest process uses it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import multiprocessing.connection as mpc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.harness import Job, Outcome

GRACE = 2.0  # seconds that the other ranks get once one has failed
PRELOAD = (
    *("torch", "torch.distributed", "torch.distributed.run", "torch.utils.checkpoint", "torch._dynamo"),
    *("torch.profiler._cupti_monitor", "pytest", "hypothesis", "hjson"),
)
PRELOAD_OURS = (
    *("deepspeed._api", "deepspeed._assemble", "deepspeed.utils.groups", "deepspeed.zero.public.access"),
    *("deepspeed.accelerator.cpu", "deepspeed.accelerator.cuda", "deepspeed.accelerator.vendors"),
    *("deepspeed.launcher.runner", "deepspeed.compile.passes.zero3_compile", "deepspeed.compile.passes.zero2_compile"),
    *("deepspeed.compile.passes.prefetch", "deepspeed.compile.passes.selective_gather"),
    *("deepspeed.compile.passes.autotp_compile", "deepspeed.compile.passes.offload_activation"),
    *("deepspeed.compile.passes.offload_adam_states", "deepspeed.compile.passes.zero1_compile"),
    *("deepspeed.checkpoint.tools", "deepspeed.checkpoint.zero_to_fp32", "deepspeed.planning.command"),
    *("deepspeed.bench.ds_bench", "deepspeed.launcher.report"),
)

Key = tuple[str, int, bool, bool]

# Loaded for the first test that compiles, and kept.
COMPILER = ("torch._inductor.compile_fx", "torch._dynamo.backends.debugging")


@dataclass
class Rank:
    """One forked rank as the server sees it."""

    rank: int
    pid: int
    connection: Connection
    folder: Path
    outcome: Outcome | None = None

    def output(self) -> str:
        return (self.folder / f"out{self.rank}").read_text(errors="replace")[-6000:]

    def stacks(self) -> str:
        """The Python stacks of every thread of the rank, written by its faulthandler on SIGUSR1."""
        file = self.folder / f"stack{self.rank}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        size, until = -1, time.monotonic() + 10
        while time.monotonic() < until and not (size == file.stat().st_size > 0):
            size = file.stat().st_size
            time.sleep(0.05)
        return file.read_text(errors="replace") or "no stack: the rank did not answer"


@dataclass
class World:
    """The ranks of a job, which may get another one when all have passed."""

    folder: Path
    ranks: list[Rank]

    @staticmethod
    def of(job: Job) -> World:
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        return World(folder, [fork(job, rank, folder) for rank in range(job.world)])

    def take(self, job: Job) -> None:
        store = self.folder / "user_store"
        shutil.rmtree(store) if store.is_dir() else store.unlink(missing_ok=True)
        for rank in self.ranks:
            rank.outcome = None
            os.truncate(self.folder / f"out{rank.rank}", 0)
            os.truncate(self.folder / f"stack{rank.rank}", 0)
            with contextlib.suppress(BrokenPipeError):  # it has died, as whoever collects finds
                rank.connection.send_bytes(pickle.dumps(job))

    def is_good(self) -> bool:
        return all(rank.outcome is not None and rank.outcome.kind in ("passed", "skipped") for rank in self.ranks)

    def end(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            rank.connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def serve(connection: Connection) -> None:
    kept: dict[Key, World] = {}  # of one file
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        for key in [key for key in kept if key[0] != job.file]:
            kept.pop(key).end()
        if job.compiles:
            load(*COMPILER)
        connection.send_bytes(pickle.dumps(run(job, kept)))


def run(job: Job, kept: dict[Key, World]) -> list[Outcome]:
    key = job.file, job.world, job.init, job.compiles
    world = kept.pop(key, None) if job.shared else None
    if world is None:
        world = World.of(job)
    else:
        world.take(job)
    try:
        collect(world.ranks, job.timeout)
        return [rank.outcome for rank in world.ranks if rank.outcome is not None]
    finally:
        if job.shared and world.is_good():
            kept[key] = world
        else:
            world.end()


def collect(ranks: list[Rank], timeout: float) -> None:
    """Wait for every rank's outcome; the deadline shrinks to a short grace when one fails."""
    deadline = time.monotonic() + timeout
    why = f"hung: not finished after {timeout:g} s"
    while waiting := [rank for rank in ranks if rank.outcome is None]:
        ready = mpc.wait([rank.connection for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting:
                text = f"{why}; its stacks:\n{rank.stacks()}"
                rank.outcome = Outcome(rank.rank, "hung", text, rank.output(), time.monotonic())
            return
        for rank in waiting:
            if rank.connection in ready:
                rank.outcome = receive(rank)
                if rank.outcome.kind not in ("passed", "skipped"):
                    deadline = min(deadline, time.monotonic() + GRACE)
                    why = f"still running {GRACE:g} s after rank {rank.rank} {rank.outcome.kind}"


def receive(rank: Rank) -> Outcome:
    try:
        kind, text = pickle.loads(rank.connection.recv_bytes())
    except EOFError:
        _, status = os.waitpid(rank.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        kind, text = "died", f"{how} before its test body ended"
    return Outcome(rank.rank, kind, text, rank.output(), time.monotonic())


def fork(job: Job, rank: int, folder: Path) -> Rank:
    ours, theirs = mpc.Pipe()
    for name in (f"out{rank}", f"stack{rank}"):
        (folder / name).touch()
    pid = os.fork()
    if pid == 0:
        ours.close()
        become(job, rank, folder, theirs)
    theirs.close()
    return Rank(rank, pid, ours, folder)


def become(job: Job, rank: int, folder: Path, connection: Connection) -> None:
    """The life of a rank; never returns. At the end it waits to be killed: no peer sees its sockets close early."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank never outlives the server
        redirect(folder, rank)
        environ = {"RANK": rank, "WORLD_SIZE": job.world, "LOCAL_RANK": rank, "LOCAL_SIZE": job.world}
        os.environ.update({name: str(value) for name, value in environ.items()})
        os.environ["TEST_STORE"] = str(folder / "user_store")
        if job.init:
            rendezvous(job, rank, folder)
        environment, at = dict(os.environ), os.getcwd()
        while True:
            connection.send_bytes(pickle.dumps(execute(job)))
            if job.shared:
                tidy(job, environment, at)
            job = pickle.loads(connection.recv_bytes())
    finally:
        os._exit(0)


def tidy(job: Job, environment: dict[str, str], folder: str) -> None:
    """Undo what a test leaves that another would notice."""
    for given in job.kwargs.values():
        if isinstance(given, sys.modules["pytest"].MonkeyPatch):
            given.undo()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    gc.collect()
    sys.modules["torch"].manual_seed(0)


def redirect(folder: Path, rank: int) -> None:
    out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    stack = open(folder / f"stack{rank}", "a")  # noqa: SIM115 - stays open for the handler
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)


def rendezvous(job: Job, rank: int, folder: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), job.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)


def execute(job: Job) -> tuple[str, str]:
    import pytest

    try:
        find(job)(**job.kwargs)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except BaseException as error:
        told = explain(error)
        told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if frame.filename != __file__])
        for frame in told.stack:
            frame.locals = {name: text[:300] for name, text in (frame.locals or {}).items()}
        return "failed", "".join(told.format())
    return "passed", ""


def explain(error: BaseException) -> traceback.TracebackException:
    """With local variables, unless one of them cannot be shown: a broken object must not hide the error."""
    try:
        return traceback.TracebackException.from_exception(error, capture_locals=True)
    except Exception:
        return traceback.TracebackException.from_exception(error)


def find(job: Job) -> Any:
    """The undecorated test body; test modules are imported after the fork, so the server never goes stale."""
    name = ".".join(Path(job.file).relative_to(Path.cwd()).with_suffix("").parts)
    target: Any = sys.modules.get(name) or import_file(name, job.file)
    for part in job.qualname.split("."):
        target = getattr(target() if isinstance(target, type) else target, part)
    while hasattr(target, "__wrapped__"):
        target = target.__wrapped__
    return target


def import_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load(*names: str) -> None:
    if any(name not in sys.modules for name in names):
        for name in names:
            importlib.import_module(name)
        freeze()


def freeze() -> None:
    """No rank looks through a million objects that it did not make, nor copies their memory by doing so."""
    gc.collect()
    gc.freeze()


def main(*further: str) -> None:
    """Load everything that ranks are to find loaded, then serve."""
    load(*PRELOAD, *PRELOAD_OURS, *further)
    # What the first config of a process finds out about the schema.
    sys.modules["deepspeed.config"].DeepSpeedConfig({"train_batch_size": 1}, world_size=1)
    sys.modules["torch"].set_num_threads(1)
    sys.modules["torch"].manual_seed(0)  # a process begins with a seed of its own: a test would fail once in a while
    freeze()
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # at once: taking libraries apart lasts, and some complain of what was frozen


if __name__ == "__main__":
    main()
