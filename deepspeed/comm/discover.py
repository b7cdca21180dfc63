"""This process's place in its job: launcher variables → `RankFacts`. Pure: reads a mapping, writes nothing.

[Note: discovery] Launchers overlap: an MPI job may run inside Slurm, torchrun inside either. RANK and WORLD_SIZE, where
both are set, decide. MPI's variables come next, then Slurm's, then "a single process". What is set by hand as well must
agree with them, because ranks that read different variables do not meet and wait for each other until a timeout.
Two exceptions: torchrun and the deepspeed launcher start one agent per machine under MPI or Slurm, whose variables then
describe the agent; and Slurm's describe its own tasks, so RANK and WORLD_SIZE set by something else are no conflict.
LOCAL_SIZE is only a hint: people export it to say how many ranks a CPU machine takes, and it stays in their shells.
One that does not fit what else is known is ignored with a warning.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed.errors import RendezvousError

_FACTS = ("rank", "world_size", "local_rank", "local_size")


@dataclass(frozen=True, slots=True)
class FoundRank:
    """The facts from one source, None where it has none; `names` are the variables that they were read from."""

    source: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def filled(self, other: FoundRank | None) -> FoundRank:
        """This, with what it leaves open taken from `other`; the source is the one that has the rank."""
        if other is None:
            return self
        gaps = {
            key: getattr(other, key) for key in _FACTS if getattr(self, key) is None and getattr(other, key) is not None
        }
        names = {**self.names, **{key: other.names[key] for key in gaps if key in other.names}}
        return replace(self, **gaps, names=names, source=other.source if "rank" in gaps else self.source)


def number(env: Mapping[str, str], name: str) -> int | None:
    """A variable as a count, None if it is unset or blank."""
    text = env.get(name, "").strip()
    if not text:
        return None
    if (count := as_count(text)) is None:
        raise problem(env, (name,), "a whole number from 0 on is needed", f"Correct or unset {name}.")
    return count


def local_ranks(unknown: int = 1) -> int:
    """Ranks on this machine, as the launcher says; `unknown` if it does not."""
    found = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    return int(found) if found.isdigit() and int(found) else unknown


def as_count(text: str) -> int | None:
    """A whole number from 0 on, None if the text is none, or one that counts nothing in this world."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def show(env: Mapping[str, str], *names: str) -> str:
    """`RANK='0', WORLD_SIZE not set`."""
    return ", ".join(f"{name}={env[name]!r}" if name in env else f"{name} not set" for name in names if name)


def problem(env: Mapping[str, str], names: tuple[str, ...], what: str, advice: str) -> RendezvousError:
    """The error about these variables: their values, what is wrong, what to do."""
    return RendezvousError(f"{show(env, *names)}: {what}. {advice}")


_RANGE = r"\s*\d+(?:-\d+)?\s*"
_NAME = rf"(?:[^,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+"  # commas in brackets belong to a name
_NODES = re.compile(rf"({_NAME})(?:,{_NAME})*")


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: where rank 0 runs."""
    match = _NODES.fullmatch(nodelist.strip())
    if match is None:
        raise RendezvousError(
            f"{nodelist!r} is not a Slurm node list such as 'node[01-03,7],gpu5'. "
            "Set MASTER_ADDR to the host of rank 0 on every rank."
        )
    return re.sub(r"\[\s*(\d+)[^\]]*\]", r"\1", match[1])


AML_PORT = 6105  # several machines
AML_SINGLE_NODE_PORT = 54965


def in_aml(env: Mapping[str, str]) -> bool:
    """True in a job of Azure Machine Learning."""
    return "AZUREML_EXPERIMENT_ID" in env


def in_aws_sm(env: Mapping[str, str]) -> bool:
    """True in a job of Amazon SageMaker."""
    return "SM_TRAINING_ENV" in env


def in_dlts(env: Mapping[str, str]) -> bool:
    """True in a job of a DLTS cluster."""
    return "DLTS_JOB_ID" in env


def aml_master(env: Mapping[str, str], single_node: bool) -> tuple[str, int]:
    """Address and port of rank 0 in an Azure ML job that was started by MPI."""
    if single_node:
        return env.get("AZ_BATCHAI_MPI_MASTER_NODE", "").strip() or "127.0.0.1", AML_SINGLE_NODE_PORT
    host = env.get("AZ_BATCH_MASTER_NODE", "").partition(":")[0].strip()
    if not host:
        raise problem(
            env,
            ("AZUREML_EXPERIMENT_ID", "AZ_BATCH_MASTER_NODE", "MASTER_ADDR"),
            "an Azure ML job on several machines names its first one in AZ_BATCH_MASTER_NODE",
            "Set MASTER_ADDR to the host of rank 0 on every rank.",
        )
    return host, AML_PORT


def sagemaker_master(env: Mapping[str, str]) -> str | None:
    """The first of SageMaker's hosts, if it lists them."""
    text = env.get("SM_HOSTS", "").strip()
    if not text:
        return None
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise problem(env, ("SM_HOSTS",), "a JSON list of host names is expected", "Set MASTER_ADDR on every rank.")
    return str(hosts[0])


Probe = Callable[[], "RankFacts"]
LOOPBACK = "127.0.0.1"
ALONE = "single process"
"""The source of facts where there is no launcher at all."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """This process's place in the job; `None` is what nobody said and nobody needs (with an `init_method`)."""

    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    master_addr: str | None
    master_port: int | None
    source: str
    doubts: tuple[str, ...] = ()  # variables that do not fit and are not used, a sentence each


_HINT = "LOCAL_SIZE"
_COMM_WORLD = (("Open MPI", "OMPI_COMM_WORLD"), ("MVAPICH", "MV2_COMM_WORLD"))
# source, rank, size, local rank (any of), local size
_MPI: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    *(
        (source, f"{start}_RANK", f"{start}_SIZE", (f"{start}_LOCAL_RANK",), (f"{start}_LOCAL_SIZE",))
        for source, start in _COMM_WORLD
    ),
    ("MPICH", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"), ("MPI_LOCALNRANKS",)),
)
# Set by torchrun and by the deepspeed launcher in the processes that they start.
_AGENTS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")


def discover(
    env: Mapping[str, str],
    *,
    port: int,
    auto_mpi: bool = True,
    need_master: bool = True,
    probe: Probe | None = None,
) -> RankFacts:
    """The facts in the variables, or a `RendezvousError` that names those which are missing or disagree.

    `probe` asks the MPI library itself; it is called only where MPI's variables are there but incomplete.
    """
    own = _own(env)
    agent = any(name in env for name in _AGENTS)
    mpi = mpi_found(env) if auto_mpi and not agent else None
    slurm = None if agent else slurm_found(env)
    decided = own.rank is not None and own.world_size is not None
    if decided and slurm is not None and (own.rank, own.world_size) != (slurm.rank, slurm.world_size):
        slurm = None
    other = mpi or slurm
    if not decided and other is None:
        return _single(env, port)
    if other is not None:
        _check_agreement(env, own, other)
    found = own.filled(other)
    if found.rank is None or found.world_size is None:
        raise _partial(env, found)
    found, doubts = _completed(env, found)
    master, master_port = _master(env, found, mpi, slurm, port) if need_master else (None, port)
    lacking = found.local_rank is None or (need_master and master is None)
    if lacking and mpi is not None and probe is not None:
        asked = probe()
        found = found.filled(FoundRank(asked.source, local_rank=asked.local_rank, local_size=asked.local_size))
        master = master or asked.master_addr
    if found.local_rank is None or (need_master and master is None):
        raise _partial(env, found, master)
    _check(env, found)
    return rank_facts(found, master, master_port, doubts)


def from_arguments(env: Mapping[str, str], rank: int, world_size: int, port: int, need_master: bool) -> RankFacts:
    """The facts where the caller of `init_distributed` gave them; what it left out comes from the environment."""
    own = _own(env)
    found = FoundRank(
        "arguments",
        rank=rank if rank >= 0 else own.rank,
        world_size=world_size if world_size > 0 else own.world_size,
        local_rank=own.local_rank,
        local_size=own.local_size,
    )
    if found.rank is None or found.world_size is None:
        raise RendezvousError(
            f"init_distributed got rank={rank}, world_size={world_size}, and {show(env, 'RANK', 'WORLD_SIZE')}. "
            "Give both arguments, or neither and start the job with a launcher."
        )
    if found.rank >= found.world_size:
        raise RendezvousError(
            f"init_distributed got rank={found.rank} of world_size={found.world_size}. "
            f"Ranks go from 0 to {found.world_size - 1}."
        )
    found, doubts = _completed(env, found)
    master, master_port = _master(env, found, None, None, port) if need_master else (None, port)
    if need_master and master is None:
        raise problem(
            env,
            ("MASTER_ADDR", "MASTER_PORT"),
            f"rank {found.rank} of {found.world_size} does not know where to meet the others",
            "Set MASTER_ADDR to the host of rank 0 on every rank, or give init_method.",
        )
    return rank_facts(found, master, master_port, doubts)


def mpi_found(env: Mapping[str, str]) -> FoundRank | None:
    """The facts in the variables of an MPI launcher, if there is one."""
    for source, rank, size, local_rank, local_size in _MPI:
        if rank not in env and size not in env:
            continue
        if rank not in env or size not in env:
            raise problem(env, (rank, size), f"{source} sets both of these", f"Start the job with {source}'s mpirun.")
        return _read(env, source, rank, size, _present(env, local_rank), _present(env, local_size))
    return None


def slurm_found(env: Mapping[str, str]) -> FoundRank | None:
    """The facts of a task in a Slurm job step, if this is one; without SLURM_PROCID it is not."""
    if "SLURM_PROCID" not in env:
        return None
    # The step's own size comes first: inside an allocation of many tasks, a step may run fewer.
    size = _present(env, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"))
    if size is None:
        raise problem(
            env,
            ("SLURM_PROCID", "SLURM_NTASKS"),
            "Slurm tells this task its number but not how many there are",
            "Start the job with srun --ntasks=N.",
        )
    return _read(env, "Slurm", "SLURM_PROCID", size, "SLURM_LOCALID", None)


def _own(env: Mapping[str, str]) -> FoundRank:
    return _read(env, "environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _read(env: Mapping[str, str], source: str, *variables: str | None) -> FoundRank:
    """The facts in the variables of rank, size, local rank and local size; None: the source has no such variable."""
    names = {key: name for key, name in zip(_FACTS, variables, strict=True) if name is not None}
    return FoundRank(source, **{key: number(env, name) for key, name in names.items()}, names=names)


def _completed(env: Mapping[str, str], found: FoundRank) -> tuple[FoundRank, tuple[str, ...]]:
    """What was found, completed by LOCAL_SIZE if that fits, and a warning if it does not."""
    if found.world_size == 1 and found.local_rank is None:
        found = found.filled(FoundRank("", local_rank=0, local_size=1))
    text = env.get(_HINT, "").strip()
    count = as_count(text) or 0
    world, local = found.world_size, found.local_rank
    if not text or (found.local_size is not None and count == found.local_size):
        return found, ()
    if found.local_size is not None:
        why = f"this machine runs {found.local_size} of the job's ranks"
    elif count < 1:
        why = "it is not a number of ranks"
    elif world is not None and count > world:
        why = f"the job has {world} ranks"
    elif local is not None and count <= local:
        why = f"this is local rank {local}"
    else:
        return found.filled(FoundRank("", local_size=count, names={"local_size": _HINT})), ()
    return found, (f"{show(env, _HINT)} is not used: {why}. Unset it, or let the launcher set it.",)


def _present(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if env.get(name, "").strip()), None)


def _check_agreement(env: Mapping[str, str], own: FoundRank, other: FoundRank) -> None:
    for name in _FACTS:
        mine, theirs = getattr(own, name), getattr(other, name)
        if mine is not None and theirs is not None and mine != theirs:
            names = (own.names[name], other.names[name])
            raise problem(
                env,
                names,
                f"these disagree about this process's {name.replace('_', ' ')}",
                f"Unset {names[0]} to follow {other.source}, or start the job with one launcher only.",
            )


def _master(
    env: Mapping[str, str], found: FoundRank, mpi: FoundRank | None, slurm: FoundRank | None, port: int
) -> tuple[str | None, int]:
    """Where rank 0 waits: said outright, by a cloud, by Slurm, or this machine if no other takes part."""
    cloud_port = None
    address = env.get("MASTER_ADDR", "").strip() or None
    if address is None and mpi is not None and in_aml(env) and not in_dlts(env):
        address, cloud_port = aml_master(env, found.world_size == found.local_size)
    if address is None and in_aws_sm(env):
        address = sagemaker_master(env)
    hosts = _present(env, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if address is None and slurm is not None and hosts is not None:
        address = first_host(env[hosts])
    if address is None and found.world_size in (1, found.local_size):
        address = LOOPBACK
    return address, number(env, "MASTER_PORT") or cloud_port or port


def _single(env: Mapping[str, str], port: int) -> RankFacts:
    """No launcher at all: one process; leftovers of one are an error, since the others would be waited for in vain."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    if any(env.get(name, "").strip() for name in names):
        raise _partial(env, _own(env), env.get("MASTER_ADDR"))
    alone, doubts = _completed(env, FoundRank(ALONE, rank=0, world_size=1, local_rank=0, local_size=1))
    return rank_facts(alone, LOOPBACK, number(env, "MASTER_PORT") or port, doubts)


def _partial(env: Mapping[str, str], found: FoundRank, master: str | None = None) -> RendezvousError:
    values = {
        "RANK": found.rank,
        "WORLD_SIZE": found.world_size,
        "LOCAL_RANK": found.local_rank,
        "MASTER_ADDR": master or env.get("MASTER_ADDR", "").strip() or None,
    }
    missing = [name for name, value in values.items() if value is None]
    names = (*values, "MASTER_PORT", *(name for name in found.names.values() if name in env and name not in values))
    return problem(
        env,
        tuple(dict.fromkeys(names)),
        f"these describe a job only in part ({found.source}): {', '.join(missing)} missing",
        f"Set {', '.join(missing)} on every rank, or start the job with the deepspeed launcher, torchrun, srun or "
        "mpirun (with mpi4py installed, MPI is asked for what is missing). For a single process, unset them all.",
    )


def _check(env: Mapping[str, str], found: FoundRank) -> None:
    rank, world, local, size = (getattr(found, key) for key in _FACTS)
    machine = "a local rank is below the number of this machine's ranks"
    for wrong, keys, what, advice in (
        (rank >= world, ("rank", "world_size"), "a rank is below the world size", _numbering(world)),
        (
            size is not None and size > world,
            ("local_size", "world_size"),
            "one machine cannot run more ranks than the job has",
            "Correct or unset the first.",
        ),
        (None not in (local, size) and local >= size, ("local_rank", "local_size"), machine, _numbering(size)),
    ):
        if wrong:
            raise problem(env, tuple(found.names[key] for key in keys), what, advice)


def _numbering(count: int | None) -> str:
    return f"Number the ranks from 0 to {count - 1}." if count else "Set the size to the number of processes."


def rank_facts(found: FoundRank, master: str | None, master_port: int, doubts: tuple[str, ...] = ()) -> RankFacts:
    """The place of a process whose rank was found."""
    assert found.rank is not None, "checked before"
    assert found.world_size is not None, "checked before"
    port = None if master is None else master_port
    return RankFacts(
        found.rank, found.world_size, found.local_rank, found.local_size, master, port, found.source, doubts
    )


def ask_mpi(port: int) -> RankFacts:
    """The facts that MPI knows; a collective of all its ranks. Needs mpi4py."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RendezvousError(
            "this is an MPI job whose variables do not tell where rank 0 runs, or this process's local rank, and "
            "mpi4py, which could ask, is not installed. Install mpi4py, or set MASTER_ADDR to the host of rank 0 "
            "and LOCAL_RANK on every rank (mpirun -x MASTER_ADDR=…)."
        ) from error
    return facts_of(MPI.COMM_WORLD, MPI.COMM_TYPE_SHARED, port)


def facts_of(world: Any, shared: int, port: int) -> RankFacts:
    """Rank and size of an MPI communicator; local ones among those that share memory; the address comes from rank 0."""
    rank, size = world.Get_rank(), world.Get_size()
    node = world.Split_type(shared)
    local_rank, local_size = node.Get_rank(), node.Get_size()
    node.Free()
    address = world.bcast(own_address() if rank == 0 and size > local_size else LOOPBACK, root=0)
    return RankFacts(rank, size, local_rank, local_size, address, port, "mpi4py")


def own_address() -> str:
    """This machine's address as others see it; connecting a datagram socket picks it and sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:  # no route: the name is all there is
            return socket.gethostname()
