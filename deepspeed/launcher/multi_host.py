"""A job on several hosts: which program starts it, what that gets, and its run under the relay; ssh is built in."""

from __future__ import annotations

import argparse
import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import remote
from deepspeed.launcher.arguments import node_words
from deepspeed.launcher.environment import ENVIRONMENT_FILE, ENVIRONMENT_FOLDERS, exported
from deepspeed.launcher.errors import LaunchError, option_words
from deepspeed.launcher.hosts import Slots, encode_world_info
from deepspeed.launcher.multinode_runner import RUNNERS, MultiNodeRunner, PDSHRunner
from deepspeed.launcher.protocol import RELAY_VARIABLE, Link, RelayPlan, RelaySetting, new_token
from deepspeed.launcher.supervise import pid_file, supervise
from deepspeed.log import logger


def run_on_hosts(args: argparse.Namespace, active: Slots) -> int:
    """Start the ranks on all hosts, wait for them, and return the exit status of the job."""
    with ExitStack() as stack:
        return _run_on_hosts(copy.copy(args), active, stack)


def _run_on_hosts(args: argparse.Namespace, active: Slots, stack: ExitStack) -> int:
    kept = bool(args.elastic_training and not args.master_addr)
    _settle(args, active)
    if kept:  # here, so that the job survives the loss of any of its hosts
        from deepspeed.elasticity.node import kept_store  # torch's agents, which every other start would wait for

        args.master_addr, args.master_port = stack.enter_context(kept_store(args))
    relayed = RelaySetting(new_token(), labels=args.output != "plain")
    folders = [Path(folder) for folder in ENVIRONMENT_FOLDERS]
    exports = exported(os.environ, get_accelerator().export_envs(), folders, ENVIRONMENT_FILE)
    exports[RELAY_VARIABLE] = str(relayed)
    environment = dict(os.environ)
    if args.launcher == "ssh":
        links = _ssh_links(args, active, exports, kept)
    else:
        runner = _runner(args, exports)  # which keeps files that its program reads
        words = runner.get_cmd(environment, active)
        # Several MPIs may be installed side by side, and only one of them is called mpirun.
        program = next((found for name in runner.programs if (found := shutil.which(name))), words[0])
        links = (Link(host="", command=[program, *words[1:]], forwards=runner.forwards),)
    world = sum(map(len, active.values()))
    logger.info(
        "starting %d ranks on %d hosts (%s) with %s", world, len(active), ", ".join(active), Path(links[0].command[0])
    )
    saved = stack.enter_context(pid_file(os.getpid())) if args.save_pid else None
    plan = RelayPlan(
        links=links,
        world=world,
        token=relayed.token,
        style=args.output,
        elastic=args.elastic_training,
        hosts=tuple(active) if args.launcher == "pdsh" else (),
        log_level="error" if args.quiet else args.log_level,
        pid_file=None if saved is None else str(saved),
    )
    return supervise(plan, environment)


def run_here(args: argparse.Namespace, active: Slots, words: Sequence[str]) -> int:
    """Start the ranks of this host below a relay, which labels or folds their lines; `words` are the launcher's."""
    relayed = RelaySetting(new_token(), labels=True)
    link = Link(
        host="",
        command=[sys.executable, "-u", "-m", "deepspeed.launcher.remote"],
        opening=remote.job(words, {RELAY_VARIABLE: str(relayed)}),
    )
    plan = RelayPlan(
        links=(link,),
        world=len(next(iter(active.values()))),
        token=relayed.token,
        style=args.output,
        elastic=args.elastic_training,
        log_level="error" if args.quiet else args.log_level,
    )
    return supervise(plan, os.environ)


def _settle(args: argparse.Namespace, active: Slots) -> None:
    """Decide what the user left open."""
    check_hosts(active)
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
            args.master_addr = _first_address(asked, args.ssh_port, given)


def _runner(args: argparse.Namespace, exports: Mapping[str, str]) -> MultiNodeRunner:
    """What builds the command of a launcher that is not built in; an error if that is not installed."""
    runner = RUNNERS[args.launcher](args)
    if not runner.installed():
        raise LaunchError(f"launcher '{runner.name}' not installed; --launcher ssh needs nothing but OpenSSH")
    for option in runner.unused:
        if getattr(args, option):
            logger.warning("--%s has no effect with --launcher %s", option, runner.name)
    if not isinstance(runner, PDSHRunner):
        runner.add_export("MASTER_PORT", str(args.master_port))
        if args.master_addr:
            runner.add_export("MASTER_ADDR", args.master_addr)
    for key, value in exports.items():
        runner.add_export(key, value)
    if runner.hidden and isinstance(runner, PDSHRunner):
        logger.warning(
            "not passed on, since everybody on the hosts could read them in the list of processes: %s. "
            "--launcher ssh passes them on unseen.",
            ", ".join(sorted(runner.hidden)),
        )
    return runner


def _first_address(hosts: Sequence[str], port: int | None, given: Sequence[str]) -> str:
    """The address of the first host that answers; the error of the last one if none does."""
    for host in hosts[:-1]:
        try:
            return address_of(host, port, given)
        except LaunchError as error:
            logger.warning("%s", error)
    return address_of(hosts[-1], port, given)


# ---- ssh

# Nothing that ssh, pdsh or mpirun would take for an option, a list, a pattern or a file of hosts.
_HOST = re.compile(r"(?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*", re.ASCII)
_LATER = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_PATIENCE = 30  # seconds for the first host to answer


def check_hosts(hosts: Iterable[str]) -> None:
    """End if a name is not that of a host."""
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise LaunchError(
                f"{host!r:.200} is not the name or address of a host; names have letters, digits, and . _ - within"
            )


def ssh_words(host: str, port: int | None, given: Sequence[str] = ()) -> list[str]:
    """The beginning of an ssh command; options of the user come first, since ssh takes the first value of each."""
    words = ["ssh", *given, "-T", "-x", "-o", "BatchMode=yes", *_LATER]
    return [*words, *(["-p", str(port)] if port is not None else []), "--", host]


def _ssh_links(args: argparse.Namespace, active: Slots, exports: Mapping[str, str], kept: bool) -> tuple[Link, ...]:
    """One link for each host."""
    info, master = encode_world_info(active), (args.master_addr, args.master_port)
    given = option_words("launcher_args", args.launcher_args)
    source = f"source {shlex.quote(args.venv_script)} && " if args.venv_script else ""
    python = shlex.join([f"PYTHONPATH={exports['PYTHONPATH']}", sys.executable])
    start = f"{source}cd {shlex.quote(os.getcwd())} && exec env {python} -u -m deepspeed.launcher.remote"
    found = []
    for node, host in enumerate(active):
        words = node_words(args, info, node_rank=node, master=master, store_kept=kept)
        command = [*ssh_words(host, args.ssh_port, given), start]
        found.append(Link(host=host, command=command, opening=remote.job(words, exports)))
    return tuple(found)


def address_of(host: str, port: int | None, given: Sequence[str] = ()) -> str:
    """The first address of a host as it says itself, which also shows that it can be reached."""
    command = [*ssh_words(host, port, given), "hostname -I"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except FileNotFoundError as error:
        raise LaunchError("there is no ssh on this machine: install OpenSSH, or use --no_ssh on each host") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"host {host} did not answer over ssh within {_PATIENCE} s; try: ssh {host} true") from error
    addresses = done.stdout.split()
    if done.returncode != 0 or not addresses:
        told = (done.stderr.strip().splitlines() or ["it told no address"])[-1]
        raise LaunchError(
            f"host {host} cannot be asked for its address over ssh (exit code {done.returncode}): {told}. "
            f"It must work without a password (ssh {host} hostname -I); or give --master_addr and --no_ssh_check."
        )
    return addresses[0]
