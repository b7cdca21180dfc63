"""The built-in launcher: one ssh for each host, with `deepspeed.launcher.remote` at its far end."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.launcher import remote
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.relay_plan import Link
from deepspeed.log import logger

__all__ = ["address_of", "check_hosts", "first_address", "links", "ssh_words"]

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
