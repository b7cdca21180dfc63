"""One host of an elastic job: where it meets the others, which world sizes the config allows, and its run."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError as MeetingFailed
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from deepspeed.config.elasticity import PLANNED, ElasticityConfig, elastic_batch, elastic_section
from deepspeed.config.read import read
from deepspeed.elasticity.elastic_agent import GuardedAgent, MakePlan, Stopped
from deepspeed.elasticity.elasticity import elasticity_enabled
from deepspeed.errors import RendezvousError
from deepspeed.launcher.ports import claim_port
from deepspeed.launcher.supervise import follow_stdin, forward_signals
from deepspeed.log import logger

RUN_ID = "ELASTIC_RUN_ID"  # the variable that names a job, where several share one store
_DEFAULT_ID = "deepspeed"
_COMING = 600  # seconds until enough hosts must have come, and until the store must be there
_ANSWER = 60  # seconds for one question to the store
_LAST_CALL = 10  # seconds that further hosts get once there are enough
_BEATS = (5, 3)  # seconds between signs of life in the rendezvous, and how many may be missing

# torch would keep the address of the first round's rank 0 for good, though that host may leave; and a host that comes
# later would wait for an address which is told only in the first round. The agent tells its own in every round.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def open_store(address: str, port: int, *, keep: bool) -> TCPStore:
    """The store at an address, or kept by this process; other hosts may come before the one that keeps it."""
    patience = timedelta(seconds=_ANSWER if keep else _COMING)
    try:
        store = TCPStore(address, port, is_master=keep, wait_for_workers=False, timeout=patience)
    except (DistError, RuntimeError, ValueError) as error:
        what = "could not be opened there" if keep else f"was not found within {_COMING} s"
        raise RendezvousError(
            f"the hosts of an elastic job meet at {address}:{port}, but the store {what}: {error}. The host there must "
            "run, and be reached from this one"
        ) from error
    store.set_timeout(timedelta(seconds=_ANSWER))
    return store


def meet(store: TCPStore, *, nodes: tuple[int, int], address: str) -> RendezvousHandler:
    """torch's rendezvous of the fewest to the most `nodes`; `address` is where others find this host."""
    os.environ[_NO_SHARED_STORE] = "1"
    run_id = os.environ.get(RUN_ID) or _DEFAULT_ID
    parameters = RendezvousParameters(
        "c10d",
        "",  # the store is there already
        run_id,
        *nodes,
        local_addr=address,
        join_timeout=_COMING,
        last_call_timeout=_LAST_CALL,
        keep_alive_interval=_BEATS[0],
        keep_alive_max_attempt=_BEATS[1],
    )
    return create_handler(store, C10dRendezvousBackend(store, run_id), parameters)


def address_towards(address: str, port: int) -> str:
    """The address of this machine on the way to another, which is also where that one finds this machine."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"this machine knows no way to {address}: {error}; give an address that it reaches"
        ) from error


_INTERVAL = 0.25  # seconds between looks at the other hosts
_CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed")


def run(
    args: argparse.Namespace,
    make_plan: MakePlan,
    environment: Mapping[str, str],
    *,
    nodes: tuple[int, int],
    slots: int,
    hangs_on_stdin: bool,
) -> int:
    """Run the ranks of this node, round after round, and return the exit status; `nodes`: the fewest and the most."""
    section = section_of(args.training_script_args)
    variables = dict(environment)
    if section is not None:
        variables.setdefault(PLANNED, json.dumps(section.model_dump(mode="json")))
    keep = args.node_rank == 0 and not args.elastic_store_kept
    with ExitStack() as stack:
        if keep:
            args.master_port = stack.enter_context(claim_port(args.master_port))
        store = open_store(args.master_addr, args.master_port, keep=keep)
        own = address_towards(args.master_addr, args.master_port)
        spec = WorkerSpec(
            role="default",
            local_world_size=slots,
            rdzv_handler=meet(store, nodes=nodes, address=own),
            entrypoint=args.training_script,
            max_restarts=args.max_elastic_restarts,
            monitor_interval=_INTERVAL,
            local_addr=own,
        )
        agent = GuardedAgent(
            spec,
            make_plan,
            variables,
            usable=usable_ranks(section),
            job=PrefixStore(f"job.{spec.rdzv_handler.get_run_id()}", store),
            keeps_store=keep,
            exit_barrier_timeout=math.inf,
        )
        if hangs_on_stdin:  # only the main thread may be interrupted
            follow_stdin(lambda number: os.kill(os.getpid(), number))
        return _run(agent, nodes, f"{args.master_addr}:{args.master_port}")


@contextmanager
def kept_store(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Keep the store of a job on other hosts, of which `args.master_addr` is one: where these find it."""
    with claim_port(args.master_port if args.master_port_chosen else 0) as port:
        own = address_towards(args.master_addr, port)
        store = open_store(own, port, keep=True)
        yield own, port
        del store  # which closes it


def _run(agent: GuardedAgent, nodes: tuple[int, int], where: str) -> int:
    fewest, most = nodes
    try:
        with forward_signals(agent.on_signal):
            if most > 1:
                logger.info("%d to %d hosts meet at %s", fewest, most, where)
            agent.run()
    except Stopped as stop:
        logger.error("the job was stopped by %s", stop)
        return 128 + stop.number
    except (MeetingFailed, DistError) as error:
        told = f": {error}" if str(error) else ""
        logger.error(
            "the hosts of the job do not meet any more (%s%s): whoever keeps their store is gone, or fewer than %d "
            "host%s came",
            *(type(error).__name__, told, fewest, "" if fewest == 1 else "s"),
        )
        return 1
    return agent.status


def usable_ranks(section: ElasticityConfig | None) -> Callable[[int], int]:
    """How many of so many ranks an elastic batch runs on; all of them where there is no plan, or none fits."""
    if section is None:
        return lambda ranks: ranks
    planned = [count * section.model_parallel_size for count in elastic_batch(section, None).valid]
    return lambda ranks: max((count for count in planned if count <= ranks), default=ranks)


def section_of(arguments: Sequence[str]) -> ElasticityConfig | None:
    """The elasticity section of the config that the script is given by its arguments, if it is."""
    given = []
    for word, following in pairwise([*arguments, ""]):
        option, sign, value = word.partition("=")
        if option in _CONFIG_OPTIONS:
            given.append(value if sign else following)
    name = next(filter(os.path.isfile, given), None)  # --deepspeed may also be a flag
    if name is None:
        logger.info("the script is given no config by --deepspeed_config: every number of ranks is tried")
        return None
    config, _ = read(name)
    if not elasticity_enabled(config):
        logger.warning("%s has no elasticity section that is enabled: every number of ranks is tried", name)
        return None
    return elastic_section(config["elasticity"])
