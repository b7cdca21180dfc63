"""A job on several hosts: which program starts it, what that gets, and its run under the relay."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import messages, remote
from deepspeed.launcher.backends import ssh
from deepspeed.launcher.backends.base import MultiNodeRunner
from deepspeed.launcher.backends.hydra import HELPER, IMPIRunner, MPICHRunner, MVAPICHRunner
from deepspeed.launcher.backends.openmpi import OpenMPIRunner
from deepspeed.launcher.backends.pdsh import PDSHRunner
from deepspeed.launcher.backends.slurm import SlurmRunner
from deepspeed.launcher.errors import LaunchError, option_words
from deepspeed.launcher.exports import ENVIRONMENT_FILE, exported
from deepspeed.launcher.node_words import node_words
from deepspeed.launcher.pidfile import pid_file
from deepspeed.launcher.relay_plan import Link, RelayPlan
from deepspeed.launcher.resources import Slots, encode_world_info
from deepspeed.launcher.supervise import supervise
from deepspeed.log import logger

__all__ = ["run_here", "run_on_hosts"]

_BACKENDS: Mapping[str, Callable[[argparse.Namespace, str, Mapping[str, int]], MultiNodeRunner]] = {
    "openmpi": OpenMPIRunner,
    "mpich": MPICHRunner,
    "impi": IMPIRunner,
    "slurm": SlurmRunner,
    "mvapich": MVAPICHRunner,
}


def run_on_hosts(args: argparse.Namespace, active: Slots) -> int:
    """Start the ranks on all hosts, wait for them, and return the exit status of the job."""
    with ExitStack() as stack:
        return _run_on_hosts(copy.copy(args), active, stack)


def _run_on_hosts(args: argparse.Namespace, active: Slots, stack: ExitStack) -> int:
    kept = bool(args.elastic_training and not args.master_addr)
    _settle(args, active)
    if kept:  # here, so that the job survives the loss of any of its hosts
        from deepspeed.launcher.elastic import kept_store  # torch's agents, which every other start would wait for

        args.master_addr, args.master_port = stack.enter_context(kept_store(args))
    token = messages.new_token()
    relayed = messages.Relayed(token, labels=args.output != "plain")
    folders = (Path.home(), Path.cwd())
    exports = exported(os.environ, get_accelerator().export_envs(), folders, ENVIRONMENT_FILE)
    exports[messages.VARIABLE] = str(relayed)
    environment = dict(os.environ)
    if args.launcher == "ssh":
        links = _ssh_links(args, active, exports, kept)
    else:
        runner = _runner(args, active, exports)  # which keeps files that its program reads
        links = (_link(runner, active, environment),)
    world = sum(map(len, active.values()))
    logger.info(
        "starting %d ranks on %d hosts (%s) with %s", world, len(active), ", ".join(active), Path(links[0].command[0])
    )
    saved = stack.enter_context(pid_file(os.getpid())) if args.save_pid else None
    plan = RelayPlan(
        links=links,
        world=world,
        token=token,
        style=args.output,
        hosts=tuple(active) if args.launcher == "pdsh" else (),
        log_level="error" if args.quiet else args.log_level,
        pid_file=None if saved is None else str(saved),
    )
    return supervise(plan, environment, program=_relay(args))


def run_here(args: argparse.Namespace, active: Slots, words: Sequence[str]) -> int:
    """Start the ranks of this host below a relay, which labels or folds their lines; `words` are the launcher's."""
    relayed = messages.Relayed(messages.new_token(), labels=True)
    link = Link(
        host="",
        command=[sys.executable, "-u", "-m", "deepspeed.launcher.remote"],
        opening=remote.job(words, {messages.VARIABLE: str(relayed)}),
    )
    plan = RelayPlan(
        links=(link,),
        world=len(next(iter(active.values()))),
        token=relayed.token,
        style=args.output,
        log_level="error" if args.quiet else args.log_level,
    )
    return supervise(plan, os.environ, program=_relay(args))


def _relay(args: argparse.Namespace) -> str:
    return "elastic_relay" if args.elastic_training else "relay"


def _settle(args: argparse.Namespace, active: Slots) -> None:
    """Decide what the user left open."""
    ssh.check_hosts(active)
    if not args.launcher_chosen and (args.elastic_training or shutil.which("pdsh") is None):
        args.launcher = "ssh"
    if args.elastic_training and args.launcher != "ssh":
        raise LaunchError(
            f"--elastic_training with --launcher {args.launcher}: only ssh can lose a host and reach it again; leave "
            "--launcher out, or start each host by itself with --no_ssh"
        )
    args.output = args.output or "rank"
    first = next(iter(active))
    if not args.master_addr and args.launcher != "slurm":  # whose tasks know the first of their nodes
        if args.no_ssh_check:
            args.master_addr = first.rpartition("@")[2]
        else:
            given = option_words("launcher_args", args.launcher_args) if args.launcher == "ssh" else []
            asked = list(active) if args.elastic_training else [first]  # of which some may be away
            args.master_addr = ssh.first_address(asked, args.ssh_port, given)


def _ssh_links(args: argparse.Namespace, active: Slots, exports: Mapping[str, str], kept: bool) -> tuple[Link, ...]:
    info = encode_world_info(active)
    master = (args.master_addr, args.master_port)
    words = [node_words(args, info, node_rank=node, master=master, store_kept=kept) for node in range(len(active))]
    return ssh.links(args, list(active), words, exports, option_words("launcher_args", args.launcher_args))


def _runner(args: argparse.Namespace, active: Slots, exports: Mapping[str, str]) -> MultiNodeRunner:
    """What builds the command of a launcher that is not built in; an error if that is not installed."""
    info = encode_world_info(active)
    runner: MultiNodeRunner
    if args.launcher == "pdsh":
        runner = PDSHRunner(args, info)
    else:
        kind = _BACKENDS[args.launcher]
        pool = {host: len(slots) for host, slots in active.items()}
        runner = kind(args if kind is MPICHRunner else _guarded(args), info, pool)
        runner.add_export("MASTER_PORT", str(args.master_port))
        if args.master_addr:
            runner.add_export("MASTER_ADDR", args.master_addr)
    if not runner.backend_exists():
        raise LaunchError(f"launcher '{runner.name}' not installed; --launcher ssh needs nothing but OpenSSH")
    for option in runner.unused:
        if getattr(args, option):
            logger.warning("--%s has no effect with --launcher %s", option, runner.name)
    for key, value in exports.items():
        runner.add_export(key, value)
    if runner.hidden and isinstance(runner, PDSHRunner):
        logger.warning(
            "not passed on, since everybody on the hosts could read them in the list of processes: %s. "
            "--launcher ssh passes them on unseen.",
            ", ".join(sorted(runner.hidden)),
        )
    return runner


def _link(runner: MultiNodeRunner, active: Slots, environment: dict[str, str]) -> Link:
    """The one program that starts all ranks; what it needs is added to `environment`."""
    command = runner.get_cmd(environment, active)
    words = list(command[0] if isinstance(command, tuple) else command)
    if isinstance(runner, SlurmRunner):
        words = runner.placed(words, environment, active)
    # Several MPIs may be installed side by side, and only one of them is called mpirun.
    program = next((found for name in runner.programs if (found := shutil.which(name))), words[0])
    return Link(host="", command=[program, *words[1:]], forwards=runner.forwards)


def _guarded(args: argparse.Namespace) -> argparse.Namespace:
    """The job as one whose script is our helper, which runs the user's."""
    inner = copy.copy(args)
    words = ["--launcher", args.launcher, f"--enable_each_rank_log={args.enable_each_rank_log}"]
    words.append(f"--log_level={'error' if args.quiet else args.log_level}")
    words += [f"--{flag}" for flag in ("module", "no_python") if getattr(args, flag)]
    inner.user_args = [*words, args.user_script, *args.user_args]
    inner.user_script, inner.module, inner.no_python = str(HELPER), False, False
    return inner
