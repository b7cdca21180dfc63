"""The options of the preflight, and the job that they stand before."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepspeed.io.sizes import parse_size
from deepspeed.launcher.arguments import HelpFormatter
from deepspeed.preflight.program import Program

__all__ = ["Options", "parse"]

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", re.IGNORECASE)
_THOUSANDS = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command asks for."""

    checkpoint: str | None = None
    config: str | None = None
    params: int | None = None
    timeout: float = 60.0
    size: int = 2**24
    write_size: int = 2**26
    skip: tuple[str, ...] = ()
    json: bool = False


def parse(argv: Sequence[str] | None, checks: Sequence[str]) -> tuple[Options, Program]:
    """The options, and the program whose start is checked; `checks` are the names that --skip takes."""
    parser = argparse.ArgumentParser(
        prog="deepspeed.preflight",
        description="Checks whether a job can run on these ranks, and trains nothing. Start it like the job: "
        "deepspeed --preflight [options of the launcher] script [arguments], or under any other launcher.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--checkpoint",
        metavar="FOLDER",
        help="where checkpoints go; if not given, what the script's arguments say "
        "(--checkpoint_dir, --save_dir or --output_dir), else the working folder",
    )
    add("--config", metavar="FILE", help="the config, where the script's arguments do not name it")
    add("--params", type=_parameters, metavar="N", help="parameters of the model, such as 7B, to hold memory against")
    add("--timeout", type=_seconds, default=60.0, metavar="S", help="seconds until a rank counts as absent")
    add("--size", type=parse_size, default="16M", help="bytes of each measured exchange between ranks")
    add("--write-size", type=parse_size, default="64M", help="bytes that each host writes to the checkpoint folder")
    add("--skip", type=_names(checks), default=(), metavar="NAMES", help=f"checks to leave out: {', '.join(checks)}")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--module", action="store_true", help="the script is a module, like python -m")
    add("--no_python", action="store_true", help="the script is any program")
    add("--local_rank", type=int, default=None, help=argparse.SUPPRESS)  # what launchers add
    add("script", nargs="?", default=None, help="the script of the job")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(argv)
    if args.module and args.no_python:
        parser.error("--module and --no_python contradict each other; give one")
    kind = "module" if args.module else "program" if args.no_python else "script"
    names = Options.__dataclass_fields__
    return Options(**{name: getattr(args, name) for name in names}), Program(args.script, kind, tuple(args.arguments))


def _parameters(text: str) -> int:
    found = _COUNT.fullmatch(text.strip())
    number = float(found[1]) * 1000 ** _THOUSANDS[found[2].upper()] if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of parameters such as 350M or 7B")
    return int(number)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 86_400:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected seconds above 0, up to a day")
    return number


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        found = tuple(word.strip() for word in text.split(",") if word.strip())
        for word in found:
            if word not in known:
                raise argparse.ArgumentTypeError(f"there is no check {word!r}; there are {', '.join(known)}")
        return found

    return read
