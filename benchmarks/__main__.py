"""The command line: `python -m benchmarks [case ...]`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import machine
from benchmarks.case import CONTENDERS, Case, Setting
from benchmarks.cases import discover
from benchmarks.environments import BENCH, assemble
from benchmarks.processes import Contender
from benchmarks.report import Report, show, write
from benchmarks.runner import Observer, run_case
from benchmarks.summary import CaseSummary, summarise

__all__ = ["main"]


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected some of {', '.join(CONTENDERS)}, with commas")
    return [name for name in CONTENDERS if name in names]


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 1 up")
    return int(text)


def _interpreter(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if name not in CONTENDERS or not separator or not path:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME=PATH, NAME one of {', '.join(CONTENDERS)}")
    return name, path


def _where(text: str) -> tuple[str, frozenset[str]]:
    key, separator, values = text.partition("=")
    if not key or not separator or not values:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected KEY=VALUE or KEY=VALUE,VALUE")
    return key, frozenset(values.split(","))


def narrowed(case: Case, wanted: Sequence[tuple[str, frozenset[str]]]) -> Case:
    """The case with only those settings whose parameters are wanted."""
    kept = [given for given in case.parameters if all(str(given.get(key)) in values for key, values in wanted)]
    return dataclasses.replace(case, parameters=tuple(kept))


def parser(cases: Sequence[str]) -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare this library, real DeepSpeed (in an environment of its own) and plain PyTorch.",
    )
    made.add_argument("cases", nargs="*", metavar="case", help=f"which to run (all by default): {', '.join(cases)}")
    made.add_argument("--rounds", type=_rounds, help="measurements per contender (each case has its own default)")
    made.add_argument("--json", type=Path, metavar="FILE", help="where to write the results (.bench/results.json)")
    made.add_argument("--only", type=_names, default=list(CONTENDERS), metavar="NAMES", help="such as ours,torch")
    made.add_argument(
        "--where",
        type=_where,
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="only settings with such a parameter, as in --where world=8,64 --where stage=3",
    )
    made.add_argument(
        "--python",
        type=_interpreter,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="use this interpreter for a contender instead of making one",
    )
    made.add_argument("--list", action="store_true", help="show the cases and stop")
    return made


def command_line(arguments: Sequence[str]) -> str:
    """The command as others would type it: options as given, files without their folders."""
    shown: list[str] = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        shown.append(f"{name}{separator}{Path(value).name}" if separator else Path(argument).name)
    return shlex.join(["python", "-m", "benchmarks", *shown])


def _list(cases: Sequence[Case], console: Console) -> None:
    for case in cases:
        settings = "; ".join(setting.label for setting in case.settings())
        console.print(f"[bold]{case.name}[/]: {case.title}", highlight=False)
        console.print(f"  {', '.join(case.contenders)}; {settings}; {case.rounds} rounds", highlight=False)


def _observer(console: Console) -> Observer:
    """Lines for a log: one per setting, and one moving line on a terminal."""
    last: list[tuple[str, str]] = []

    def observe(case: Case, setting: Setting, turn: int, contender: Contender) -> None:
        place = (case.name, setting.label)
        if console.is_terminal:
            console.print(
                f"\r\x1b[K{case.name}, {setting.label}: round {turn + 1}, {contender.name}", end="", highlight=False
            )
        elif not last or last[-1] != place:
            console.print(f"measuring {case.name}, {setting.label}", highlight=False)
        last[:] = [place]

    return observe


def run(cases: Sequence[Case], options: argparse.Namespace, arguments: Sequence[str]) -> Report:
    """Make the contenders and measure."""
    console = Console(stderr=True)
    wanted = [name for name in options.only if any(name in _homes(case) for case in cases)]
    contenders, versions, missing = assemble(
        wanted, dict(options.python), lambda line: console.print(line, highlight=False, markup=False)
    )
    for name, reason in missing.items():
        console.print(f"{name} is left out: {reason}", style="yellow", markup=False)
    observer = _observer(console)
    summaries: list[CaseSummary] = [
        summarise(run_case(case, contenders, rounds=options.rounds, observer=observer)) for case in cases
    ]
    if console.is_terminal:
        console.print("\r\x1b[K", end="")
    return Report(
        command=command_line(arguments),
        rounds=options.rounds,
        machine=machine.describe(),
        contenders=versions,
        missing=missing,
        cases=tuple(summaries),
    )


def _homes(case: Case) -> set[str]:
    return {name.partition(":")[0] for name in case.contenders}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where ours could not be measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    known = discover()
    made = parser(list(known))
    options = made.parse_args(arguments)
    unknown = [name for name in options.cases if name not in known]
    if unknown:
        made.error(f"no case is named {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.cases] or list(known.values())
    cases = [case for case in (narrowed(case, options.where) for case in chosen) if case.parameters]
    if not cases:
        made.error(f"no setting of {', '.join(case.name for case in chosen)} is what --where asks for")
    # a pipe has no width of its own; eighty columns would break every row
    console = Console() if sys.stdout.isatty() else Console(width=150)
    if options.list:
        _list(cases, console)
        return 0
    report = run(cases, options, arguments)
    show(report, console)
    file = options.json or BENCH / "results.json"
    write(report, file)
    console.print(f"\nwritten to {os.path.relpath(file)}", highlight=False, markup=False)
    failed = "ours" in report.missing or any(
        "ours" in setting.failures for case in report.cases for setting in case.settings
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
