"""What the ranks of a job run: the options of `deepspeed.launcher.launch`, and a preflight in the place of a script."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

from deepspeed.launcher.elastic_options import elastic_words
from deepspeed.launcher.errors import LaunchError, option_words

__all__ = ["node_words", "preflight_of"]

_PREFLIGHT = "deepspeed.preflight"


def node_words(
    args: argparse.Namespace,
    world_info: str,
    *,
    node_rank: int | str | None,
    master: tuple[str, int],
    save_pid: int = 0,
    store_kept: bool = False,
    script: Sequence[str] | None = None,
) -> list[str]:
    """What follows `python -m deepspeed.launcher.launch`; `script` replaces the user's script and arguments.

    `store_kept`: the hosts of an elastic job meet at a store that no node keeps.
    """
    words = [f"--world_info={world_info}"]
    if node_rank is not None:
        words.append(f"--node_rank={node_rank}")
    words += [f"--master_addr={master[0]}", f"--master_port={master[1]}"]
    words += [f"--{name}" for name in ("no_python", "module", "no_local_rank") if getattr(args, name)]
    if save_pid:
        words.append(f"--save_pid={save_pid}")
    words.append(f"--enable_each_rank_log={args.enable_each_rank_log}")
    if args.bind_cores_to_rank:
        words.append("--bind_cores_to_rank")
    if args.bind_core_list is not None:
        words.append(f"--bind_core_list={args.bind_core_list}")
    if args.quiet:
        words.append("--quiet")
    words.append(f"--log_level={args.log_level}")
    words += elastic_words(args, kept=store_kept)
    return [*words, *([args.user_script, *args.user_args] if script is None else script)]


def preflight_of(args: argparse.Namespace) -> argparse.Namespace:
    """The same job with the preflight in the place of the script, which it gets as its arguments."""
    if args.module and args.no_python:
        raise LaunchError("--module and --no_python contradict each other: a module is run by Python; give one of them")
    job = copy.copy(args)
    kind = [f"--{name}" for name in ("module", "no_python") if getattr(args, name)]
    job.user_args = [*option_words("preflight_args", args.preflight_args), *kind, args.user_script, *args.user_args]
    job.user_script, job.module, job.no_python = _PREFLIGHT, True, False
    job.elastic_training = False  # it looks once, at all hosts
    return job
