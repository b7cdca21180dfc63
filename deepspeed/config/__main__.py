"""`python -m deepspeed.config check|explain|schema`: look at a config without running anything."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.config.deepspeed_config import data_parallel_ranks, implied_ranks
from deepspeed.config.explain import ExplainedValue, batch_values, json_schema, readers_of, rows
from deepspeed.config.features import keys_without_effect, unbuilt
from deepspeed.config.load import Loaded, load
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 is a good config, 1 a bad one, 2 a wrong command line."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except DeepSpeedConfigError as error:
        sys.stderr.write(f"{given.file}: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepspeed.config", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="check|explain|schema")
    check = commands.add_parser("check", help="validate a config and say everything that is wrong with it")
    explain = commands.add_parser("explain", help="print every effective value, where it came from, and what reads it")
    for command, run in ((check, _check), (explain, _explain)):
        command.add_argument("file", metavar="FILE", help="a JSON or HJSON file, or base64 text")
        command.add_argument("--world-size", type=int, default=None, metavar="N", help="number of processes")
        command.set_defaults(run=run)
    explain.add_argument("--changed", action="store_true", help="leave out the values that are defaults")
    explain.add_argument("--json", action="store_true", help="print JSON instead of a table")
    schema = commands.add_parser("schema", help="write a JSON Schema for editors")
    schema.add_argument("--output", metavar="FILE", help="write to this file instead of the standard output")
    schema.set_defaults(run=_schema, file="schema")
    return parser


def _world_size(loaded: Loaded, given: int | None) -> int:
    """The number of processes: as given, else as many as the config's own sizes need."""
    if given is not None and given < 1:
        raise DeepSpeedConfigError(f"--world-size is {given}; it must be at least 1")
    return given or implied_ranks(loaded.schema) * math.prod(loaded.schema.axis_sizes.values())


def _check(given: argparse.Namespace) -> int:
    # Imported here: only this command tries what needs torch.
    from deepspeed._assemble.trial import verdict

    loaded = load(given.file, partial=True)
    found = verdict(loaded, _world_size(loaded, given.world_size))
    for problem in found.problems:
        sys.stderr.write(f"{given.file}: {problem}\n")
    for note in found.notes:
        sys.stdout.write(f"{given.file}: {note}\n")
    if found.problems:
        return 1
    sys.stdout.write(f"{given.file}: valid\n")
    return 0


def _explain(given: argparse.Namespace) -> int:
    loaded = load(given.file, partial=True)
    ranks = data_parallel_ranks(loaded.schema, None, None, _world_size(loaded, given.world_size))
    try:
        batch = batch_values(loaded, ranks)
    except BatchSizeError:
        if not loaded.autos:
            raise
        batch = {}
    shown = [row for row in rows(loaded, batch) if not (given.changed and row.is_default)]
    if given.json:
        table = [
            {"key": row.path, "value": row.value, "origin": row.origin, "readers": readers_of(row.path)}
            for row in shown
        ]
        # infinity and NaN become text: JSON has no such numbers, and other programs read this
        strict = json.loads(json.dumps(table, default=_plain), parse_constant=str)
        sys.stdout.write(json.dumps(strict, indent=2) + "\n")
    else:
        _print(shown, f"{given.file} on {ranks} data-parallel rank{'s' if ranks != 1 else ''}")
    for problem in (*unbuilt(loaded.schema), *keys_without_effect(loaded.schema, loaded.given)):
        sys.stderr.write(f"note: {problem}\n")
    return 0


def _plain(value: object) -> object:
    return getattr(value, "value", None) or str(value)


def _print(shown: list[ExplainedValue], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("key", "value", "origin", "read by deepspeed."):
        table.add_column(name, no_wrap=name == "key", overflow="fold")
    section = None
    for row in shown:
        head = row.path.split(".")[0] if "." in row.path else ""
        if section is not None and head != section:
            table.add_section()
        section = head
        value = json.dumps(row.value, default=_plain)
        style = "dim" if row.is_default else "green" if row.origin.startswith("given") else "cyan"
        table.add_row(row.path, value, row.origin, " ".join(readers_of(row.path)), style=style)
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 160))
    console.print(table)


def _schema(given: argparse.Namespace) -> int:
    text = json.dumps(json_schema(), indent=2) + "\n"
    if not given.output:
        sys.stdout.write(text)
        return 0
    try:
        Path(given.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DeepSpeedConfigError(f"--output {given.output} cannot be written: {error.strerror}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
