"""The node's part of an elastic job: where it meets the others, which world sizes the config allows, and its run."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError as MeetingFailed

from deepspeed.config.elastic_batch import PLANNED, elastic_batch, elastic_section
from deepspeed.config.elasticity import ElasticityConfig
from deepspeed.config.read import read
from deepspeed.elasticity.agent import Crew, GuardedAgent, Stopped
from deepspeed.elasticity.elasticity import elasticity_enabled
from deepspeed.elasticity.meeting import address_towards, meet, open_store
from deepspeed.launcher.ports import claimed
from deepspeed.launcher.supervise import hang_on_stdin, passing_on
from deepspeed.log import logger

__all__ = ["kept_store", "run", "section_of", "usable_ranks"]

_INTERVAL = 0.25  # seconds between looks at the other hosts
_CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed")


def run(
    args: argparse.Namespace,
    crew: Crew,
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
            args.master_port = stack.enter_context(claimed(args.master_port))
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
            crew,
            variables,
            usable=usable_ranks(section),
            job=PrefixStore(f"job.{spec.rdzv_handler.get_run_id()}", store),
            keeps_store=keep,
            exit_barrier_timeout=math.inf,
        )
        if hangs_on_stdin:  # only the main thread may be interrupted
            hang_on_stdin(lambda number: os.kill(os.getpid(), number))
        return _run(agent, nodes, f"{args.master_addr}:{args.master_port}")


@contextmanager
def kept_store(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Keep the store of a job on other hosts, of which `args.master_addr` is one: where these find it."""
    with claimed(args.master_port if args.master_port_chosen else 0) as port:
        own = address_towards(args.master_addr, port)
        store = open_store(own, port, keep=True)
        yield own, port
        del store  # which closes it


def _run(agent: GuardedAgent, nodes: tuple[int, int], where: str) -> int:
    fewest, most = nodes
    try:
        with passing_on(agent.on_signal):
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
