"""`ds_nvme_tune`: tries settings of the `aio` section on a disk, shows their speeds and writes down the best."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deepspeed.errors import UsageError
from deepspeed.io.ds_io import count, report_errors
from deepspeed.io.trial import Folder, Trial, parse_size, problem_of, show_size, speed

SWEEP: dict[str, list[Any]] = {
    "block_size": ["1M", "8M"],
    "queue_depth": [32, 128],
    "sequential_requests": [True, False],
    "single_submit": [False, True],
    "io_parallel": [1, 2, 4, 8],
}


@dataclass(frozen=True)
class TrialResult:
    """One combination and what it reached in GB/s; None for what was not measured."""

    settings: Mapping[str, Any]
    read: float | None
    write: float | None

    @property
    def seconds(self) -> float:
        """Of moving a gigabyte in every direction that was measured: states are read and written once per step."""
        return sum(1 / speed for speed in (self.read, self.write) if speed)

    @property
    def section(self) -> dict[str, Any]:
        """The config's `aio` section with these settings."""
        return {
            "block_size": self.settings["block_size"],
            "queue_depth": self.settings["queue_depth"],
            "intra_op_parallelism": self.settings["io_parallel"],
            "single_submit": self.settings["single_submit"],
            "overlap_events": not self.settings["sequential_requests"],
        }


def read_sweep(path: str) -> dict[str, list[Any]]:
    """The lists of a JSON file, for all or some of the keys of `SWEEP`; a UsageError says what is wrong with one."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"--sweep_config: {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--sweep_config: {path} holds {type(found).__name__}; expected an object of lists")
    for key, values in found.items():
        if key not in SWEEP:
            raise UsageError(f"--sweep_config: {path} has the key {key!r}; expected some of {', '.join(SWEEP)}")
        if not isinstance(values, list) or not values:
            raise UsageError(f"--sweep_config: {key} of {path} is {values!r}; expected a list of values to try")
    return {**SWEEP, **found}


def combinations(sweep: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination, as settings of a trial; a UsageError names a value that is none."""
    rows = [list(dict.fromkeys(_value(key, value) for value in sweep[key])) for key in SWEEP]
    return [dict(zip(SWEEP, row, strict=True)) for row in itertools.product(*rows)]


def _value(key: str, value: Any) -> Any:
    default = SWEEP[key][0]
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise UsageError(f"{key}: found {value!r}, expected true or false")
    if key == "block_size":
        try:
            return parse_size(value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{key}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key}: found {value!r}, expected a whole number from 1 up")
    return value


# ---- the command

_SHOWN = 10
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def main(argv: Sequence[str] | None = None) -> int:
    """Try everything, print a table, write the best `aio` section; 0 if that went well."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.no_read and arguments.no_write:
        parser.error("--no_read and --no_write leave nothing to measure")
    flaw = problem_of(_trial(arguments, read=True, settings={}))
    if flaw:
        parser.error(flaw)
    return report_errors("ds_nvme_tune", lambda: _tune(arguments))


def _tune(arguments: argparse.Namespace) -> None:
    sweep = read_sweep(arguments.sweep_config) if arguments.sweep_config else SWEEP
    if arguments.flush_page_cache:
        _drop_caches()  # now, so that a user who may not is told at once
    folders: list[Folder] = [(folder, n if arguments.gpu else 0) for n, folder in enumerate(arguments.nvme_dir)]
    console = Console(file=sys.stderr)
    outcomes: list[TrialResult] = []
    tried = combinations(sweep)
    logs = Path(arguments.log_dir)
    logs.mkdir(parents=True, exist_ok=True)
    for number, settings in enumerate(tried, 1):
        measure = functools.partial(_measure, arguments, settings, folders)
        read = None if arguments.no_read else measure(read=True)
        write = None if arguments.no_write else measure(read=False)
        outcomes.append(TrialResult(settings, read, write))
        if arguments.verbose:
            console.print(f"{number}/{len(tried)}", _words(outcomes[-1]), highlight=False)
    chosen = min(outcomes, key=lambda each: each.seconds)
    _write_json(logs / "results.json", [dataclasses.asdict(each) for each in outcomes])
    _write_json(logs / "aio.json", {"aio": chosen.section})
    _show(outcomes, chosen)
    sys.stdout.write(f"{json.dumps({'aio': chosen.section}, indent=2)}\nwritten to {logs / 'aio.json'}\n")


def _measure(arguments: argparse.Namespace, settings: dict[str, object], folders: list[Folder], *, read: bool) -> float:
    if arguments.flush_page_cache:
        _drop_caches()
    return speed(_trial(arguments, read=read, settings=settings), folders)


def _trial(arguments: argparse.Namespace, *, read: bool, settings: dict[str, object]) -> Trial:
    made = Trial(read, arguments.io_size, loops=arguments.loops, gpu=arguments.gpu, use_gds=arguments.gds)
    return dataclasses.replace(made, **settings)  # type: ignore[arg-type]


def _drop_caches() -> None:
    os.sync()
    try:
        _DROP_CACHES.write_text("1")
    except OSError as error:
        raise UsageError(f"--flush_page_cache: only root may do that ({error.strerror}: {_DROP_CACHES})") from error


def _write_json(path: Path, content: object) -> None:
    """Written whole or not at all: an earlier answer stays until there is another."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


_COLUMNS: dict[str, Callable[[TrialResult], str]] = {
    "block size": lambda each: show_size(each.settings["block_size"]),
    "queue depth": lambda each: str(each.settings["queue_depth"]),
    "threads": lambda each: str(each.settings["io_parallel"]),
    "submit": lambda each: "single" if each.settings["single_submit"] else "batch",
    "overlap": lambda each: "no" if each.settings["sequential_requests"] else "yes",
    "read GB/s": lambda each: "" if each.read is None else f"{each.read:.2f}",
    "write GB/s": lambda each: "" if each.write is None else f"{each.write:.2f}",
}


def _words(outcome: TrialResult) -> str:
    return ", ".join(f"{name} {text(outcome)}" for name, text in _COLUMNS.items() if text(outcome))


def _show(outcomes: Sequence[TrialResult], chosen: TrialResult) -> None:
    shown = sorted(outcomes, key=lambda each: each.seconds)[:_SHOWN]
    table = Table(*_COLUMNS, box=box.SIMPLE, title=f"The best {len(shown)} of {len(outcomes)}")
    for each in shown:
        table.add_row(*(text(each) for text in _COLUMNS.values()))
    Console(file=sys.stdout).print(table)
    found = {"read": chosen.read, "write": chosen.write}
    told = ", ".join(f"{way} = {value:.2f}" for way, value in found.items() if value is not None)
    sys.stdout.write(f"Best performance (GB/sec): {told}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_nvme_tune", description="Find the `aio` section of the config with which a disk is fastest."
    )
    add = parser.add_argument
    add("--nvme_dir", nargs="+", required=True, metavar="FOLDER", help="where to measure; several are used at once")
    add("--sweep_config", metavar="FILE", help=f"JSON object of lists to try, of {', '.join(SWEEP)}")
    add("--no_read", action="store_true", help="do not measure reads")
    add("--no_write", action="store_true", help="do not measure writes")
    add("--io_size", type=parse_size, default=400 * 2**20, help="bytes per file (400M)")
    add("--gpu", action="store_true", help="move memory of the device")
    add("--gds", action="store_true", help="by GPUDirect Storage, with --gpu")
    add("--flush_page_cache", action="store_true", help="empty the page cache before every measurement (root)")
    add("--log_dir", default="./_aio_bench_logs", help="where aio.json and results.json go (./_aio_bench_logs)")
    add("--loops", type=count, default=1, help="measured times (1)")
    add("--verbose", action="store_true", help="tell every combination as it is measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
