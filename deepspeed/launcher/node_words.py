"""The options of `deepspeed.launcher.launch` for one node of a job, as `deepspeed` and pdsh hand them over."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["node_words"]


def node_words(
    args: argparse.Namespace,
    world_info: str,
    *,
    node_rank: int | str | None,
    master: tuple[str, int],
    save_pid: int = 0,
    script: Sequence[str] | None = None,
) -> list[str]:
    """What follows `python -m deepspeed.launcher.launch`; `script` replaces the user's script and arguments."""
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
    return [*words, *([args.user_script, *args.user_args] if script is None else script)]
