"""The options of the preflight, and what the job before which they stand would run."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.io.trial import parse_size
from deepspeed.launcher.arguments import HelpFormatter

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", re.IGNORECASE)
_THOUSANDS = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command asks for."""

    checkpoint: str | None = None
    config: str | None = None
    params: int | None = None
    model: str | None = None
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
    add("--model", metavar="TARGET", help="plan the job: what builds its model, as for ds_plan, such as train.py")
    add("--timeout", type=_seconds, default=60.0, metavar="S", help="seconds until a rank counts as absent")
    add("--size", type=parse_size, default="16M", help="bytes of each measured exchange between ranks")
    add("--write-size", type=parse_size, default="64M", help="bytes that each host writes to the checkpoint folder")
    add("--skip", type=_names, default=(), metavar="NAMES", help=f"checks to leave out: {', '.join(checks)}")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--module", action="store_true", help="the script is a module, like python -m")
    add("--no_python", action="store_true", help="the script is any program")
    add("--local_rank", type=int, default=None, help=argparse.SUPPRESS)  # what launchers add
    add("script", nargs="?", default=None, help="the script of the job")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(argv)
    if args.module and args.no_python:
        parser.error("--module and --no_python contradict each other; give one")
    if unknown := [name for name in args.skip if name not in checks]:
        parser.error(f"--skip: there is no check {unknown[0]!r}; there are {', '.join(checks)}")
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


# ---- the program of the job

CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepscale_config", "--deepspeed")
FOLDER_OPTIONS = ("--checkpoint_dir", "--checkpoint-dir", "--save_dir", "--save-dir", "--output_dir", "--output-dir")
_MOST_FILES = 2000
_MOST_BYTES = 16 * 2**20  # of one file; what is larger is not code


@dataclass(frozen=True, slots=True)
class Program:
    """The command of a rank: a script, a module (`kind` is "module") or any program ("program"), and its arguments."""

    name: str | None
    kind: str = "script"
    arguments: tuple[str, ...] = ()

    @property
    def file(self) -> Path | None:
        """The file that would be run; None where there is none."""
        if self.name is None:
            return None
        if self.kind == "module":
            return _module_file(self.name)
        if self.kind == "program":
            found = shutil.which(self.name)
            return None if found is None else Path(found)
        return Path(self.name) if Path(self.name).is_file() else None

    @property
    def config(self) -> str | None:
        """What the arguments give as the config."""
        return option_of(self.arguments, CONFIG_OPTIONS)


def option_of(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of the first of these options, written `--name value` or `--name=value`; a flag has none."""
    for place, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name in names:
            if separator:
                return value
            if place + 1 < len(words) and not words[place + 1].startswith("-"):
                return words[place + 1]
    return None


def _module_file(name: str) -> Path | None:
    """The file of a module; its package is found, not imported, since that would run code of the job."""
    first, *others = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    places = [] if spec is None else [Path(folder, *others) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place / "__main__.py", place.with_suffix(".py"))]
    if spec is not None and spec.origin and not others and not spec.submodule_search_locations:
        files = [Path(spec.origin)]
    return next((file for file in files if file.is_file()), None)


def digest_of(file: Path) -> str | None:
    """A short digest of a file's bytes; None if it cannot be read or is no file."""
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def code_of(folder: Path) -> dict[str, str]:
    """Path below the folder → digest, of the Python files in it and in the packages below it."""
    found: dict[str, str] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in sorted(folders) if name[0] != "." and Path(place, name, "__init__.py").is_file()]
        for file in (Path(place, name) for name in sorted(files) if name.endswith(".py") and name[0] != "."):
            if len(found) < _MOST_FILES and (digest := digest_of(file)) is not None:
                found[str(file.relative_to(folder))] = digest
    return found
