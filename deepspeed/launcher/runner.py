"""The `deepspeed` command: which devices of which hosts take part, and the start of the job there."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.interface import DeepSpeedAccelerator
from deepspeed.errors import AcceleratorError
from deepspeed.launcher import launch
from deepspeed.launcher.arguments import check_kind, elastic_nodes, node_words, parse_args, preflight_of
from deepspeed.launcher.environment import ENVIRONMENT_FILE
from deepspeed.launcher.errors import LaunchError, run_program
from deepspeed.launcher.hosts import (
    Slots,
    apply_num_nodes_and_gpus,
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
)
from deepspeed.launcher.multi_host import run_here, run_on_hosts
from deepspeed.log import logger, set_log_level_from_string

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "fetch_hostfile", "main", "parse_args", "parse_inclusion_exclusion"]

DEEPSPEED_ENVIRONMENT_NAME = ENVIRONMENT_FILE


def main(args: Sequence[str] | None = None) -> None:
    """The command; returns if all ranks ended with 0, else ends the process with the job's exit status."""
    run_program("deepspeed", lambda: _run(parse_args(args)))


def _run(args: argparse.Namespace) -> int:
    set_log_level_from_string("error" if args.quiet else args.log_level)
    _refuse(args)
    args = preflight_of(args) if args.preflight else args
    accelerator = get_accelerator()
    asked = bool(args.include or args.exclude or args.num_gpus > 0 or args.num_nodes > 0)
    visible = _take_visible(accelerator)
    there = accelerator.device_count()
    pool = None
    if Path(args.hostfile).is_file():
        pool = fetch_hostfile(args.hostfile)
    elif args.hostfile_chosen:
        raise LaunchError(
            f"--hostfile {args.hostfile}: there is no such file; write one line such as `worker-1 slots=8` for each "
            "host, or leave --hostfile out to use this machine alone"
        )
    active: Slots
    if pool is None and visible is not None and not asked:
        active = {"localhost": _named_devices(*visible, there)}
    else:
        if visible is not None:
            why = "options choose the devices" if pool is None else "the hostfile chooses the devices"
            logger.warning("%s=%s is ignored: %s", *visible, why)
        active = _chosen(args, _local_pool(args, accelerator, there) if pool is None else pool)
    if args.autotuning:
        os.environ.update([visible] if visible is not None else [])  # for the launchers of the experiments
        return run_autotuning(args, active)
    if args.elastic_training:
        elastic_nodes(args, len(active))
    if (len(active) > 1 or args.force_multi) and not args.no_ssh:
        return run_on_hosts(args, active)
    _check_node(args, active)
    node = args.node_rank if args.no_ssh else 0
    _check_devices(active, list(active)[node], accelerator, there)
    words = _launch_arguments(args, active)
    return launch.run(launch.parse_args(words)) if args.output in ("", "plain") else run_here(args, active, words)


def run_autotuning(args: argparse.Namespace, active_resources: Slots) -> int:
    """Search for the fastest config of the job; with `--autotuning run`, this process then becomes the job."""
    from deepspeed.autotuning import Autotuner  # the planner and its engines, which every other start would wait for

    tuner = Autotuner(args, active_resources)
    tuner.tune()
    tuner.print_tuning_results()
    if args.autotuning == "run":
        tuner.run_after_tuning()
    return 0


def _refuse(args: argparse.Namespace) -> None:
    """End with what cannot be done, or cannot be meant, before anything is looked at."""
    if args.autotuning and (args.preflight or args.elastic_training or args.no_ssh):
        raise LaunchError(
            "--autotuning starts the whole job again and again; leave out --preflight, --elastic_training and --no_ssh"
        )
    if args.budget is not None and not args.autotuning:
        raise LaunchError("--budget limits --autotuning, which is not given; give that, too")
    if max(args.min_elastic_nodes, args.max_elastic_nodes) > 0 and not args.elastic_training:
        raise LaunchError("--min_elastic_nodes and --max_elastic_nodes belong to --elastic_training; give that, too")
    check_kind(args)
    if args.preflight_args and not args.preflight:
        raise LaunchError("--preflight_args are options of --preflight, which is not given")
    chosen = [name for name in ("include", "exclude") if getattr(args, name)]
    counted = [name for name in ("num_nodes", "num_gpus") if getattr(args, name) > 0]
    if chosen and counted:
        raise LaunchError(f"--{counted[0]} and --{chosen[0]} both choose the devices; give one of them")
    for name in ("num_nodes", "num_gpus"):
        if getattr(args, name) != -1 and getattr(args, name) < 1:
            raise LaunchError(f"--{name} {getattr(args, name)} is not a number of them; give 1 or more")


def _take_visible(accelerator: DeepSpeedAccelerator) -> tuple[str, str] | None:
    """Name and value of the variable that limits the visible devices; it is removed, since ranks get their own."""
    taken = None
    for name in accelerator.visible_devices_envs():
        value = os.environ.pop(name, None)
        if value is not None:
            taken = name, value  # where several are set, the last one wins
    return taken


def _named_devices(name: str, value: str, there: int) -> list[int | str]:
    """The devices that a visible-devices variable lists, in its order: numbers, or names such as UUIDs."""
    devices: list[int | str] = []
    for word in value.split(","):
        text = word.strip()
        if text.startswith("-"):
            break  # as for the driver: nothing from here on
        if text.isascii() and text.isdigit():
            if int(text) >= there:
                raise LaunchError(
                    f"{name}={value}: No slot '{int(text)}' specified on host 'localhost'; it has {there} devices"
                )
            devices.append(int(text))
        elif text:
            devices.append(text)
    if not devices:
        raise AcceleratorError(f"{name}={value!r} hides all {there} devices; unset it, or list the devices to use")
    return devices


def _local_pool(args: argparse.Namespace, accelerator: DeepSpeedAccelerator, there: int) -> dict[str, int]:
    if args.num_nodes > 1:
        raise LaunchError(
            f"--num_nodes {args.num_nodes}: there is no hostfile {args.hostfile}, so only this machine is known; "
            "list the hosts in a hostfile"
        )
    if there == 0:
        raise AcceleratorError(
            f"no device of the accelerator {accelerator.device_name()!r} was found; ds_report tells why, and "
            "DS_ACCELERATOR=cpu runs on the host's cores"
        )
    return {"localhost": there}


def _chosen(args: argparse.Namespace, pool: dict[str, int]) -> dict[str, list[int]]:
    active = parse_inclusion_exclusion(pool, args.include, args.exclude)
    active = apply_num_nodes_and_gpus(active, args.num_nodes, args.num_gpus)
    active = {host: slots for host, slots in active.items() if slots}
    if not active:
        raise LaunchError("no slot is left to run on: the hostfile has none, or --include and --exclude leave none")
    return active


def _check_node(args: argparse.Namespace, active: Slots) -> None:
    """What only makes sense where this host starts its own ranks, and what does not."""
    for name in ("launcher_args", "ssh_port", "venv_script", "no_ssh_check"):
        if getattr(args, name):
            logger.warning("--%s has no effect: no other host is reached over ssh", name)
    hosts = list(active)
    if args.no_ssh:
        if not 0 <= args.node_rank < len(hosts):
            raise LaunchError(
                f"--no_ssh needs --node_rank, from 0 to {len(hosts) - 1} ({', '.join(hosts)}); it is {args.node_rank}"
            )
    elif args.node_rank not in (-1, 0):
        logger.warning("--node_rank %d is not used without --no_ssh: the only host is number 0", args.node_rank)


def _check_devices(active: Slots, host: str, accelerator: DeepSpeedAccelerator, there: int) -> None:
    """Slots that this machine does not have would only fail in the ranks; cores of the CPU are no such limit."""
    name = accelerator.device_name()
    highest = max((slot for slot in active[host] if isinstance(slot, int)), default=-1)
    if name != "cpu" and highest >= there:
        raise AcceleratorError(
            f"slots {','.join(map(str, active[host]))} of {host} are wanted, but this machine has {there} {name} "
            f"device{'' if there == 1 else 's'}; ask for fewer"
        )


def _launch_arguments(args: argparse.Namespace, active: Slots) -> list[str]:
    """The options of `deepspeed.launcher.launch` for this node."""
    address = args.master_addr or ("127.0.0.1" if len(active) == 1 else next(iter(active)))
    # Several hosts must know the port before anybody can look which one is free.
    port = args.master_port if args.master_port_chosen or len(active) > 1 else 0
    return node_words(
        args,
        encode_world_info(active),
        node_rank=args.node_rank if args.no_ssh else None,
        master=(address, port),
        save_pid=os.getpid() if args.save_pid else 0,
    )


if __name__ == "__main__":
    main()
