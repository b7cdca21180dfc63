"""The options of elastic jobs, as the `deepspeed` command takes them and as a node is told them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from deepspeed.launcher.errors import LaunchError

__all__ = ["add_counts", "elastic_nodes", "elastic_words"]

_RESTARTS = 100
_COUNTS = ("min_elastic_nodes", "max_elastic_nodes", "max_elastic_restarts")


def add_counts(add: Callable[..., object]) -> None:
    """The options that both commands have."""
    add("--min_elastic_nodes", type=int, default=-1, help="fewest hosts to train on; -1: one")
    add("--max_elastic_nodes", type=int, default=-1, help="most hosts to train on; -1: all")
    add("--max_elastic_restarts", type=int, default=_RESTARTS, help="failures after which the job is given up")


def elastic_words(args: argparse.Namespace, *, kept: bool = False) -> list[str]:
    """What a node is told; `kept`: somebody else keeps the store at which the hosts meet. Nothing if not asked for."""
    if not args.elastic_training:
        return []
    words = [f"--{name}={getattr(args, name)}" for name in _COUNTS]
    return ["--enable_elastic_training", *words, *(["--elastic_store_kept"] if kept else [])]


def elastic_nodes(args: argparse.Namespace, hosts: int) -> tuple[int, int]:
    """The fewest and the most hosts to train on, of so many; an error if these cannot be."""
    fewest = 1 if args.min_elastic_nodes == -1 else args.min_elastic_nodes
    most = max(hosts, fewest) if args.max_elastic_nodes == -1 else args.max_elastic_nodes
    if not 1 <= fewest <= most:
        raise LaunchError(
            f"--min_elastic_nodes {fewest} and --max_elastic_nodes {most} are no range of hosts; give 1 or more, and "
            "not less for the most than for the fewest"
        )
    if fewest > hosts:
        raise LaunchError(f"--min_elastic_nodes {fewest}: the job has only {hosts} host{'' if hosts == 1 else 's'}")
    if args.max_elastic_restarts < 0:
        raise LaunchError(f"--max_elastic_restarts {args.max_elastic_restarts} is not a number of them; give 0 or more")
    return fewest, most
