"""The options of the `deepspeed` command and of the launcher of one node, and the words that pass them on."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.launcher.errors import LaunchError, option_words
from deepspeed.launcher.ports import DEFAULT_PORT
from deepspeed.log import log_levels

DEFAULT_HOSTFILE = "/job/hostfile"
LAUNCHERS = ("pdsh", "ssh", "openmpi", "mpich", "impi", "slurm", "mvapich")
STYLES = ("plain", "rank", "fold")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of an option that has one; those that only mean "not given" say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        absent = action.default in (None, "", "None", -1, ()) or isinstance(action.default, bool)
        return action.help if absent else super()._get_help_string(action)


class _StoreChoice(argparse.Action):
    """Stores the value, and that the user chose it: only a default gives way, to a free port, to ssh or to one host."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_chosen", True)


def parse_args(args: Sequence[str] | None = None, prog: str = "deepspeed") -> argparse.Namespace:
    """The parsed command line; everything after the script belongs to the script. `prog` is who complains."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Starts one process per device, here or on several hosts, and waits for all of them.",
        formatter_class=HelpFormatter,
    )
    _add_resources(parser)
    _add_meeting(parser)
    _add_script(parser)
    _add_process(parser)
    _add_elastic(parser)
    parser.add_argument("user_script", help="the script to start, followed by its own arguments")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(hostfile_chosen=False, master_port_chosen=False, launcher_chosen=False)
    words = sys.argv[1:] if args is None else list(args)
    parsed = parser.parse_args(words)
    parsed.launcher_words = words[: len(words) - len(parsed.user_args) - 1]
    return parsed


def _add_resources(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("devices").add_argument
    add(
        "-H",
        "--hostfile",
        default=DEFAULT_HOSTFILE,
        action=_StoreChoice,
        help="hosts, one `name slots=count` per line; if it is not given and there is no such file, this machine",
    )
    add("-i", "--include", default="", help="hosts and slots to use: w0@w1:0,2 is all of w0 and two slots of w1")
    add("-e", "--exclude", default="", help="hosts and slots not to use, written like --include")
    add("--num_nodes", type=int, default=-1, help="use only the first hosts of the hostfile")
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="use the devices 0 to N-1 of every host; without devices, start N processes on the CPU",
    )


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several hosts").add_argument
    add(
        "--master_port",
        type=int,
        default=DEFAULT_PORT,
        action=_StoreChoice,
        help="port at which rank 0 waits; if it is not given, a single host takes the first free one from there on",
    )
    add(
        "--master_addr",
        default="",
        help="address of rank 0's host; one host: 127.0.0.1, else what the first host answers over ssh",
    )
    add("--node_rank", type=int, default=-1, help="number of this host, where each of several starts itself (--no_ssh)")
    add(
        "--launcher",
        type=str.lower,
        choices=LAUNCHERS,
        default="pdsh",
        action=_StoreChoice,
        help="what starts ranks on other hosts; if it is not given and pdsh is not installed, ssh",
    )
    add("--launcher_args", default="", help="words for that program")
    add("--no_ssh", action="store_true", help="every host runs this command itself, with its --node_rank")
    add("--no_ssh_check", action="store_true", help="do not test that the first host can be reached")
    add("--force_multi", action="store_true", help="use the program of --launcher for a single host too")
    add("--ssh_port", type=int, default=None, help="port of ssh on the other hosts")
    add("--venv_script", default=None, help="script to source on each host before the start")


def _add_script(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("script").add_argument
    add_script_kind(add)
    add("--no_local_rank", action="store_true", help="do not give the script --local_rank=N")
    add("--preflight", action="store_true", help="start the ranks, check what a job needs, and train nothing")
    add(
        "--preflight_args",
        default="",
        metavar="WORDS",
        help="options of the preflight: --preflight_args='--params 7B --json'",
    )
    add(
        "--autotuning",
        choices=("tune", "run"),
        default="",
        help="search for the fastest config with short runs of the script; run: then start the job with it",
    )
    add("--budget", type=float, default=None, metavar="MINUTES", help="time that --autotuning may take")


def _add_process(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("processes").add_argument
    add(
        "--save_pid",
        action="store_true",
        help="write this launcher's pid to <pid>.deepspeed in $XDG_RUNTIME_DIR or the cache folder",
    )
    add("--bind_cores_to_rank", action="store_true", help="give each rank an equal share of the cores")
    add("--bind_core_list", default=None, help="bind to these cores, such as 0,2-4,6, instead of all")
    add(
        "--output",
        choices=STYLES,
        default="",
        help="lines of ranks as they come (plain, the default on one host), with their rank (rank, the default on "
        "several), or lines that several ranks write once (fold)",
    )
    add_logs(add)
    add("-q", "--quiet", action="store_true", help="the same as --log_level error")


def add_script_kind(add: Callable[..., object]) -> None:
    """The options of all commands that run a script; see `check_kind`."""
    add("--module", action="store_true", help="run the script as a module, like python -m")
    add("--no_python", action="store_true", help="run the script itself, not with Python")


def add_logs(add: Callable[..., object]) -> None:
    """The options about output of all commands that start ranks."""
    add("--enable_each_rank_log", default="None", metavar="FOLDER", help="write each rank's output to a file there")
    add("--log_level", choices=list(log_levels), default="info", help="what the launcher itself tells")


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("elastic training").add_argument
    add("--elastic_training", action="store_true", help="start again after a failure, with the hosts there are then")
    add_counts(add)


# ---- elastic jobs

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


def check_kind(args: argparse.Namespace) -> None:
    """An error if the script is to be run in two ways."""
    if args.module and args.no_python:
        raise LaunchError("--module and --no_python contradict each other: a module is run by Python; give one of them")


# ---- words for the nodes

_PREFLIGHT = "deepspeed.preflight"


def node_words(
    args: argparse.Namespace,
    world_info: str,
    *,
    node_rank: int | str | None,
    master: tuple[str, int],
    save_pid: int = 0,
    store_kept: bool = False,
) -> list[str]:
    """What follows `python -m deepspeed.launcher.launch`; `store_kept`: no node keeps the store of an elastic job."""
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
    return [*words, args.user_script, *args.user_args]


def preflight_of(args: argparse.Namespace) -> argparse.Namespace:
    """The same job with the preflight in the place of the script, which it gets as its arguments."""
    job = copy.copy(args)
    kind = [f"--{name}" for name in ("module", "no_python") if getattr(args, name)]
    job.user_args = [*option_words("preflight_args", args.preflight_args), *kind, args.user_script, *args.user_args]
    job.user_script, job.module, job.no_python = _PREFLIGHT, True, False
    job.elastic_training = False  # it looks once, at all hosts
    return job
