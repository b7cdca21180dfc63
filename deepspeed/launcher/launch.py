"""The launcher of one node, `python -m deepspeed.launcher.launch`: environment and command of each rank, then its run.

Exit status: 0 if every rank ended with 0; else that of the rank that failed first, 128 + s if signal s killed it;
128 + s if signal s was sent to the launcher and not every rank ended with 0; 127 if a rank could not be started;
2 for a mistake found before anything was started.

Over ssh the job comes through stdin (`--job_from_stdin`, and no other option), so that neither its environment nor its
arguments pass a shell or are seen in the list of processes. What comes afterwards is read by `supervise`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher.arguments import HelpFormatter, add_counts, add_logs, add_script_kind, check_kind, elastic_nodes
from deepspeed.launcher.binding import Binding, bind, usable_cores
from deepspeed.launcher.errors import LaunchError, run_program
from deepspeed.launcher.hosts import Slots, decode_world_info
from deepspeed.launcher.ports import DEFAULT_PORT, claim_port
from deepspeed.launcher.protocol import (
    RELAY_VARIABLE,
    NodePlacement,
    NodePlan,
    RankPlan,
    framed,
    labels_only,
    log_files,
    receive,
)
from deepspeed.launcher.supervise import pid_file, supervise
from deepspeed.log import logger, set_log_level_from_string


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the per-node launcher; everything after the script belongs to the script."""
    parser = argparse.ArgumentParser(
        prog="deepspeed.launcher.launch",
        description="Starts the ranks of one node and waits for them; `deepspeed` calls it.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--node_rank", type=int, default=0, help="which of the hosts of the world info this is")
    add("--master_addr", default="127.0.0.1", help="address of the host of rank 0")
    add("--master_port", type=int, default=DEFAULT_PORT, help="port at which rank 0 waits; 0: a free one, on one node")
    add("--world_info", required=True, help="hosts and their slots, coded by encode_world_info")
    add_script_kind(add)
    add("--no_local_rank", action="store_true", help="do not give the script --local_rank=N")
    add("--save_pid", type=int, default=0, help="name of the file that holds this launcher's pid; 0: no file")
    add("--bind_cores_to_rank", action="store_true", help="give each rank cores of its own")
    add("--bind_core_list", default=None, help="the cores to share out, such as 0,2-4,6")
    add_logs(add)
    add("-q", "--quiet", action="store_true", help="the same as --log_level error")
    add("--enable_elastic_training", action="store_true", help="meet other nodes again after a failure, and start anew")
    add_counts(add)
    add("--elastic_store_kept", action="store_true", help="somebody else keeps the store at which the nodes meet")
    add("training_script", help="the script, module or program to start")
    add("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Run the ranks of this node; a status other than 0 ends the process with it."""
    words = sys.argv[1:] if args is None else list(args)
    job = _job_from_stdin if words == [_FROM_STDIN] else lambda: words
    run_program("deepspeed.launcher.launch", lambda: run(parse_args(job())))


_FROM_STDIN = "--job_from_stdin"
FAR_END = ("-u", "-m", "deepspeed.launcher.launch", _FROM_STDIN)
"""What an interpreter is started with to read a job, on another host or below a relay."""


def job_bytes(arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """What is written to the far end: options of the per-node launcher, and variables to set."""
    return framed(json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode())


def _job_from_stdin() -> list[str]:
    text = receive(sys.stdin.fileno())
    if not text:
        raise LaunchError(f"no job came through stdin; {_FROM_STDIN} is for the deepspeed command, over ssh")
    wanted = json.loads(text)
    os.environ.update(wanted["environment"])
    return list(wanted["arguments"])


def run(args: argparse.Namespace) -> int:
    """Run the ranks of this node and return the exit status."""
    level = "error" if args.quiet else args.log_level
    set_log_level_from_string(level)
    world = decode_world_info(args.world_info)
    host = _host(args, world)
    _check_program(args)
    relay = os.environ.pop(RELAY_VARIABLE, "")
    environment = dict(os.environ)
    get_accelerator().set_visible_devices_envs(environment, world[host])
    with ExitStack() as stack:
        saved = None
        if args.save_pid:
            saved = stack.enter_context(pid_file(args.save_pid))
            logger.info("pid %d saved in %s", os.getpid(), saved)

        def make_plan(place: NodePlacement) -> NodePlan:
            plan = NodePlan(
                ranks=tuple(_ranks(args, place)),
                log_level=level,
                pid_file=None if saved is None else str(saved),
                forward_to_groups=args.no_python,
                # A failure is not the end of an elastic job, so that the relay hears of none.
                relay=labels_only(relay) if args.enable_elastic_training else relay,
            )
            logger.info(
                "starting %d of %d ranks on %s (slots %s), which meet at %s:%d: %s",
                *(place.local, place.world, host, ",".join(map(str, world[host][: place.local]))),
                *(*place.master, plan.ranks[0].shown),
            )
            return plan

        if args.enable_elastic_training:
            from deepspeed.elasticity import node  # torch's agents, which every other start would wait for

            nodes = elastic_nodes(args, len(world))
            slots = len(world[host])
            return node.run(args, make_plan, environment, nodes=nodes, slots=slots, hangs_on_stdin=bool(relay))
        if args.node_rank == 0:
            args.master_port = stack.enter_context(claim_port(args.master_port))
        plan = make_plan(NodePlacement.of(world, host, (args.master_addr, args.master_port)))
        return supervise(plan, environment, hangs_on_stdin=bool(relay))


def _host(args: argparse.Namespace, world: Slots) -> str:
    """The name of this host in the world info."""
    if not 0 <= args.node_rank < len(world):
        raise LaunchError(f"--node_rank {args.node_rank}: the job has {len(world)} nodes, numbered from 0")
    if args.master_port == 0 and len(world) > 1:
        raise LaunchError(f"--master_port 0: the {len(world)} nodes have to be told one port; choose it")
    host: str = list(world)[args.node_rank]
    if not world[host]:
        raise LaunchError(f"host {host!r} has no slots in --world_info; leave it out or give it some")
    return host


def _ranks(args: argparse.Namespace, place: NodePlacement) -> Iterator[RankPlan]:
    environments = place.environments()
    bindings: list[Binding] | None = None
    if args.bind_cores_to_rank or args.bind_core_list:
        bindings = bind(len(environments), args.bind_core_list)
    logs = log_files(args.enable_each_rank_log, [int(environment["RANK"]) for environment in environments])
    for local_rank, environment in enumerate(environments):
        command = _command(args, local_rank)
        cores: tuple[int, ...] = ()
        if bindings is not None:
            binding = bindings[local_rank]
            command, cores = [*binding.prefix, *command], binding.affinity
            environment["OMP_NUM_THREADS"] = str(len(binding.cores))
        elif "OMP_NUM_THREADS" not in os.environ and get_accelerator().device_name() == "cpu":
            # Several CPU ranks that each start a thread per core slow each other down many times over.
            environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // len(environments)))
        yield RankPlan(
            rank=int(environment["RANK"]),
            local_rank=local_rank,
            command=tuple(command),
            environment=environment,
            cores=cores,
            log=logs.get(int(environment["RANK"])),
        )


def _command(args: argparse.Namespace, local_rank: int) -> list[str]:
    command = [] if args.no_python else [sys.executable, "-u", *(["-m"] if args.module else [])]
    command.append(args.training_script)
    if not args.no_local_rank:
        command.append(f"--local_rank={local_rank}")
    return [*command, *args.training_script_args]


def _check_program(args: argparse.Namespace) -> None:
    script = args.training_script
    check_kind(args)
    if args.no_python:
        if shutil.which(script) is None:
            raise LaunchError(
                f"--no_python: there is no program {script!r} that can be executed in {os.getcwd()} or PATH"
            )
    elif not args.module and not Path(script).exists():
        raise LaunchError(
            f"there is no script {script!r} in {os.getcwd()}. Options of the launcher come before the script; "
            "a module needs --module, a program that is not Python --no_python."
        )


if __name__ == "__main__":
    main()
