"""One rank that mpirun or srun starts: its variables under the names that scripts know, and a guard around it.

The guard is what tells the launcher who failed first, with which code: mpirun and srun answer with the largest code,
or with that of a rank which they killed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from deepspeed.comm.discover import discover
from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.arguments import add_logs, add_script_kind
from deepspeed.launcher.errors import MISTAKE
from deepspeed.launcher.guard import Guard
from deepspeed.launcher.ports import DEFAULT_PORT
from deepspeed.launcher.protocol import RELAY_VARIABLE, NodePlan, RankPlan, log_files
from deepspeed.log import set_log_level_from_string


def main(words: Sequence[str]) -> int:
    """Run the rank and return its exit status."""
    args = _parse(words)
    set_log_level_from_string(args.log_level)
    relay = os.environ.pop(RELAY_VARIABLE, "")
    try:
        plan = _plan(args, relay)
    except DeepSpeedError as error:
        sys.stderr.write(f"{args.launcher}: error: {error}\n")
        sys.stderr.flush()
        return MISTAKE
    # mpirun and srun end this process themselves; no byte ever comes through this pipe.
    control, _held = os.pipe()
    return Guard(plan, control).run()


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launcher_helper", allow_abbrev=False)
    add = parser.add_argument
    add("--launcher", required=True, help="the program that started this one")
    add_script_kind(add)
    add_logs(add)
    add("script", help="the script, module or program to start")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(words)


def _plan(args: argparse.Namespace, relay: str) -> NodePlan:
    facts = discover(os.environ, port=DEFAULT_PORT)
    known = {
        "RANK": facts.rank,
        "WORLD_SIZE": facts.world_size,
        "LOCAL_RANK": facts.local_rank,
        "LOCAL_SIZE": facts.local_size,
        "LOCAL_WORLD_SIZE": facts.local_size,
        "MASTER_ADDR": facts.master_addr,
        "MASTER_PORT": facts.master_port,
    }
    python = [] if args.no_python else [sys.executable, "-u", *(["-m"] if args.module else [])]
    command = (*python, args.script, *args.arguments)
    rank = RankPlan(
        rank=facts.rank,
        local_rank=facts.local_rank or 0,
        command=command,
        environment={name: str(value) for name, value in known.items() if value is not None},
        log=log_files(args.enable_each_rank_log, [facts.rank]).get(facts.rank),
    )
    return NodePlan(
        ranks=(rank,),
        log_level=args.log_level,
        forward_to_groups=args.no_python,
        relay=relay,
    )
