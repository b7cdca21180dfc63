"""`ds_ssh`: one command on all hosts of a hostfile, its lines with the name of the host before them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.launcher.arguments import DEFAULT_HOSTFILE, HelpFormatter
from deepspeed.launcher.errors import LaunchError, option_words, run_program
from deepspeed.launcher.hosts import fetch_hostfile, parse_inclusion_exclusion
from deepspeed.launcher.multi_host import check_hosts, ssh_words
from deepspeed.launcher.protocol import Link, RelayPlan, new_token
from deepspeed.launcher.supervise import supervise


def add_hosts(parser: argparse._ActionsContainer, default: str | None) -> None:
    """The options that name hosts, for the tools that ask all of them."""
    add = parser.add_argument
    add("-f", "-H", "--hostfile", default=default, help="hosts, one `name slots=count` per line")
    add("-i", "--include", default="", help="hosts to use: w0@w1")
    add("-e", "--exclude", default="", help="hosts not to use")
    add("--ssh_port", type=int, default=None, help="port of ssh on the hosts")
    add("--ssh_args", default="", help="words for ssh")


def hosts_of(args: argparse.Namespace) -> list[str]:
    """The hosts that the options name."""
    pool = fetch_hostfile(args.hostfile) if Path(args.hostfile).is_file() else None
    if pool is None:
        raise LaunchError(f"there is no hostfile {args.hostfile}; name one with --hostfile")
    hosts = list(parse_inclusion_exclusion(pool, args.include, args.exclude))
    check_hosts(hosts)
    return hosts


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; ends the process with the largest exit code of the hosts."""
    run_program("ds_ssh", lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_ssh",
        description="Runs a command on all hosts at once; it is put together and run by their shells, as ssh does.",
        formatter_class=HelpFormatter,
    )
    add_hosts(parser, DEFAULT_HOSTFILE)
    parser.add_argument("command", help="the command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _run(args: argparse.Namespace) -> int:
    line = " ".join([args.command, *args.arguments])
    given = option_words("ssh_args", args.ssh_args)
    links = tuple(Link(host=host, command=[*ssh_words(host, args.ssh_port, given), line]) for host in hosts_of(args))
    plan = RelayPlan(
        links=links, world=len(links), token=new_token(), style="host", log_level="warning", independent=True
    )
    return supervise(plan, os.environ)


if __name__ == "__main__":
    main(sys.argv[1:])
