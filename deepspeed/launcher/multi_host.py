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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import remote
from deepspeed.launcher.arguments import node_words
from deepspeed.launcher.environment import ENVIRONMENT_FILE, ENVIRONMENT_FOLDERS, exported
from deepspeed.launcher.errors import LaunchError, option_words
from deepspeed.launcher.hosts import Slots, encode_world_info
from deepspeed.launcher.multinode_runner import (
    HELPER,
    IMPIRunner,
    MPICHRunner,
    MultiNodeRunner,
    MVAPICHRunner,
    OpenMPIRunner,
    PDSHRunner,
    SlurmRunner,
)
from deepspeed.launcher.protocol import RELAY_VARIABLE, Link, RelayPlan, RelaySetting, new_token
from deepspeed.launcher.supervise import pid_file, supervise
from deepspeed.log import logger

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
        from deepspeed.elasticity.node import kept_store  # torch's agents, which every other start would wait for

        args.master_addr, args.master_port = stack.enter_context(kept_store(args))
    token = new_token()
    relayed = RelaySetting(token, labels=args.output != "plain")
    folders = [Path(folder) for folder in ENVIRONMENT_FOLDERS]
    exports = exported(os.environ, get_accelerator().export_envs(), folders, ENVIRONMENT_FILE)
    exports[RELAY_VARIABLE] = str(relayed)
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
            args.master_addr = first_address(asked, args.ssh_port, given)


def _ssh_links(args: argparse.Namespace, active: Slots, exports: Mapping[str, str], kept: bool) -> tuple[Link, ...]:
    info = encode_world_info(active)
    master = (args.master_addr, args.master_port)
    words = [node_words(args, info, node_rank=node, master=master, store_kept=kept) for node in range(len(active))]
    return links(args, list(active), words, exports, option_words("launcher_args", args.launcher_args))


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


def links(
    args: argparse.Namespace,
    hosts: Sequence[str],
    words: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    given: Sequence[str] = (),
) -> tuple[Link, ...]:
    """One link for each host; `words` are the options of its per-node launcher."""
    source = f"source {shlex.quote(args.venv_script)} && " if args.venv_script else ""
    python = shlex.join([f"PYTHONPATH={environment['PYTHONPATH']}", sys.executable])
    start = f"{source}cd {shlex.quote(os.getcwd())} && exec env {python} -u -m deepspeed.launcher.remote"
    return tuple(
        Link(host=host, command=[*ssh_words(host, args.ssh_port, given), start], opening=remote.job(own, environment))
        for host, own in zip(hosts, words, strict=True)
    )


def first_address(hosts: Sequence[str], port: int | None, given: Sequence[str] = ()) -> str:
    """The address of the first host that answers; the error of the last one if none does."""
    for host in hosts[:-1]:
        try:
            return address_of(host, port, given)
        except LaunchError as error:
            logger.warning("%s", error)
    return address_of(hosts[-1], port, given)


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
