"""`init_distributed`: discovers this process's place, writes it to the environment, joins the job.

[Note: tracebacks] Frames of this library, of torch and of Python that lie between the user's lines are left out. Those
below the user's last line are left out for errors of this library, whose message says all there is to know; for any
other error they are where it comes from, and stay. `DEEPSPEED_FULL_TRACEBACK=1` leaves out nothing.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as td
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host import keep_heap
from deepspeed.comm import discover as discovery
from deepspeed.comm import shared_memory
from deepspeed.comm.discover import (
    RankFacts,
    ask_mpi,
    discover,
    from_arguments,
    mpi_found,
    problem,
    show,
)
from deepspeed.comm.groups import is_initialized
from deepspeed.comm.logger import COMMS_LOGGER
from deepspeed.comm.watch.threads import is_users
from deepspeed.errors import CommError, DeepSpeedError, RendezvousError
from deepspeed.log import log_dist, log_dist_once, warn_once

DEFAULT_PORT = 29500
_DEFAULT_MINUTES = 10.0
_AML_INTERFACES = "^docker0,lo"  # NCCL must not choose the container bridge of Azure ML's machines


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise torch.distributed unless somebody has; without any launcher this is a job of one process.

    `timeout` defaults to DEEPSPEED_TIMEOUT minutes (10); the backend to the accelerator's. `rank` and `world_size`
    override the environment. The comms logger records what `config` asks for. `dist_init_required=False` only checks.
    """
    if config is not None:
        COMMS_LOGGER.join(config)
    shorten_uncaught()
    if get_accelerator().device_name() == "cpu":
        keep_heap()
    if is_initialized():
        return
    if dist_init_required is False:
        raise CommError(
            "dist_init_required=False says that torch.distributed is initialised already, but it is not. "
            "Initialise it first, or leave dist_init_required out."
        )
    limit = default_timeout(os.environ) if timeout is None else timeout
    backend = dist_backend or get_accelerator().communication_backend_name()
    if not backend:
        raise CommError(
            f"accelerator {get_accelerator().device_name()!r} names no communication backend. Give dist_backend."
        )
    need_master = init_method is None
    if rank >= 0 or world_size > 0:
        facts = from_arguments(os.environ, rank, world_size, distributed_port, need_master)
    else:
        probe = functools.partial(ask_mpi, distributed_port)
        facts = discover(
            os.environ, port=distributed_port, auto_mpi=auto_mpi_discovery, need_master=need_master, probe=probe
        )
    _warn_if_alone(os.environ, facts)
    _publish(facts)
    if in_aml() and not in_dlts():
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _AML_INTERFACES)
    _join(backend, facts, limit, init_method)
    if verbose:
        log_dist(
            f"torch.distributed initialised: backend {backend}, {facts.world_size} ranks, by {facts.source}", ranks=[0]
        )


def default_timeout(env: Mapping[str, str]) -> timedelta:
    """How long a collective may take: DEEPSPEED_TIMEOUT in minutes, 10 if it is unset."""
    text = env.get("DEEPSPEED_TIMEOUT", "").strip()
    try:
        minutes = float(text) if text else _DEFAULT_MINUTES
    except ValueError:
        minutes = math.nan
    if not (0 < minutes < math.inf):
        raise problem(env, ("DEEPSPEED_TIMEOUT",), "a positive number of minutes is expected", "Correct or unset it.")
    return timedelta(minutes=minutes)


def _warn_if_alone(env: Mapping[str, str], facts: RankFacts) -> None:
    """A batch script's body looks like task 0 of its job, but nobody starts the others."""
    steps = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
    if facts.source == "Slurm" and facts.world_size > 1 and not any(name in env for name in steps):
        warn_once(
            f"{show(env, 'SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID')}: this process was not started by srun; "
            f"waiting for {facts.world_size - 1} other ranks. Use srun, or unset SLURM_PROCID for a single process"
        )


def _publish(facts: RankFacts) -> None:
    """Write the facts where torch and scripts look for them; the only place that changes the environment."""
    values = {
        "RANK": facts.rank,
        "WORLD_SIZE": facts.world_size,
        "LOCAL_RANK": facts.local_rank,
        "LOCAL_SIZE": facts.local_size,
        "MASTER_ADDR": facts.master_addr,
        "MASTER_PORT": facts.master_port,
    }
    if facts.doubts and facts.local_size is None:
        os.environ.pop("LOCAL_SIZE", None)  # it was found wrong: nobody further down shall believe it
    os.environ.update({name: str(value) for name, value in values.items() if value is not None})
    for doubt in facts.doubts:
        log_dist_once(doubt, level=logging.WARNING)


def _join(backend: str, facts: RankFacts, timeout: timedelta, init_method: str | None) -> None:
    # A job of one meets nobody: an in-memory store needs no port and no file.
    alone = facts.world_size == 1 and init_method is None
    where: dict[str, Any] = {"init_method": init_method or "env://"}
    if alone:
        where = {"store": td.HashStore()}  # type: ignore[attr-defined]
    try:
        if not alone and init_method is None and kept_by_agent():
            assert facts.master_addr is not None, "it is needed where no init_method is given"
            assert facts.master_port is not None, "an address has a port"
            kept = TCPStore(facts.master_addr, facts.master_port, facts.world_size, is_master=False, timeout=timeout)
            where = {"store": agreed_store(kept, rank=facts.rank, world=facts.world_size, timeout=timeout)}
        td.init_process_group(backend, timeout=timeout, rank=facts.rank, world_size=facts.world_size, **where)
    except (RuntimeError, ValueError) as error:
        place = init_method or f"{facts.master_addr}:{facts.master_port}"
        raise RendezvousError(
            f"rank {facts.rank} of {facts.world_size} (found by {facts.source}) could not join the job at {place} "
            f"with backend {backend!r} within {timeout}: {error}. Every rank must reach that address, use the same "
            "one, and be started; a port in use by another job needs another MASTER_PORT or distributed_port."
        ) from error
    shared_memory.meet(td.group.WORLD)


# Whether this is a job of Azure Machine Learning, of Amazon SageMaker, of a DLTS cluster.
in_aml = functools.partial(discovery.in_aml, os.environ)
in_aws_sm = functools.partial(discovery.in_aws_sm, os.environ)
in_dlts = functools.partial(discovery.in_dlts, os.environ)


def mpi_discovery(distributed_port: int = DEFAULT_PORT, verbose: bool = True) -> None:
    """Write this process's place in an MPI job to the environment; asks mpi4py for what the variables lack."""
    probe = functools.partial(ask_mpi, distributed_port)
    if mpi_found(os.environ) is None:
        facts = probe()
    else:
        facts = discover(os.environ, port=distributed_port, probe=probe)
    _publish(facts)
    if verbose:
        log_dist(f"MPI discovery: {facts}", ranks=[0])


_SHORTEST, _LONGEST = 0.01, 0.5  # seconds between two looks of rank 0
_AGAIN = timedelta(seconds=5)  # after which a rank says its word again: a dying one may have overwritten it


def kept_by_agent(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the store at MASTER_ADDR is one that torch's agent keeps over restarts."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agreed_store(store: Store, *, rank: int, world: int, timeout: timedelta) -> Store:
    """The part of the store that these ranks agree upon; returns once all of them have."""
    until = time.monotonic() + timeout.total_seconds()
    name = _answer(store, world, until) if rank == 0 else _ask(store, rank, until)
    return PrefixStore(f"attempt/{name}", store)


def _answer(store: Store, world: int, until: float) -> str:
    name = secrets.token_hex(8)
    words = [f"word/{rank}" for rank in range(1, world)]
    answered: set[bytes] = set()
    pause = _SHORTEST
    while (confirmed := store.add(f"confirmed/{name}", 0)) < world - 1:
        if time.monotonic() > until:
            raise DistStoreError(f"{confirmed} of {world - 1} ranks confirmed that they are part of this attempt")
        if store.check(words):
            new = set(store.multi_get(words)) - answered
            for word in new:
                store.set(f"answer/{word.decode()}", name)
            answered |= new
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return name


def _ask(store: Store, rank: int, until: float) -> str:
    word = secrets.token_hex(8)
    while True:
        store.set(f"word/{rank}", word)
        try:
            store.wait([f"answer/{word}"], _AGAIN)
            break
        except DistStoreError:
            if time.monotonic() > until:
                raise
    name: str = store.get(f"answer/{word}").decode()
    store.add(f"confirmed/{name}", 1)
    return name


VARIABLE = "DEEPSPEED_FULL_TRACEBACK"

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


class _Shortening:
    """Shortens an error on its way to the hook that prints it."""

    def __init__(self, hook: _Hook) -> None:
        self._hook = hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(VARIABLE, "") in ("", "0"):
            shorten(error)
            trace = error.__traceback__
        self._hook(kind, error, trace)


def shorten_uncaught() -> None:
    """From now on, errors that end this program are printed short, by whatever prints them now."""
    if not isinstance(sys.excepthook, _Shortening):
        sys.excepthook = _Shortening(sys.excepthook)


def shorten(error: BaseException) -> None:
    """Leave frames out of an error and of those that led to it, and say how many; for one that is only printed."""
    one: BaseException | None = error
    left_out, seen = 0, set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        left_out += _cut(one)
        cause = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if cause is not None and isinstance(one, DeepSpeedError) and str(cause).strip() in str(one):
            one.__cause__, one.__suppress_context__, cause = None, True, None  # it quotes what led to it
        one = cause
    if left_out and sys.version_info >= (3, 11):
        error.add_note(f"({left_out} frames inside libraries are left out; {VARIABLE}=1 shows them)")


def _cut(error: BaseException) -> int:
    """Shorten one traceback; how many frames are gone."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    users = [at for at, one in enumerate(frames) if is_users(one.tb_frame.f_code.co_filename)]
    if not users:
        return 0
    below = () if isinstance(error, DeepSpeedError) else range(users[-1] + 1, len(frames))
    kept: TracebackType | None = None
    for at in reversed((*users, *below)):
        kept = TracebackType(kept, frames[at].tb_frame, frames[at].tb_lasti, frames[at].tb_lineno)
    error.__traceback__ = kept
    return len(frames) - len(users) - len(below)
