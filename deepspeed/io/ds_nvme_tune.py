"""`ds_nvme_tune`: tries settings of the `aio` section on a disk, shows their speeds and writes down the best."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from deepspeed.errors import UsageError
from deepspeed.io.ds_io import count, report_errors
from deepspeed.io.runs import Folder, speed
from deepspeed.io.sizes import parse_size, show_size
from deepspeed.io.sweep import SWEEP, Outcome, best, combinations, read_sweep
from deepspeed.io.trial import Trial, problem_of

__all__ = ["main"]

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
    outcomes: list[Outcome] = []
    tried = combinations(sweep)
    logs = Path(arguments.log_dir)
    logs.mkdir(parents=True, exist_ok=True)
    for number, settings in enumerate(tried, 1):
        measure = functools.partial(_measure, arguments, settings, folders)
        read = None if arguments.no_read else measure(read=True)
        write = None if arguments.no_write else measure(read=False)
        outcomes.append(Outcome(settings, read, write))
        if arguments.verbose:
            console.print(f"{number}/{len(tried)}", _words(outcomes[-1]), highlight=False)
    chosen = best(outcomes)
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


_COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "block size": lambda each: show_size(each.settings["block_size"]),
    "queue depth": lambda each: str(each.settings["queue_depth"]),
    "threads": lambda each: str(each.settings["io_parallel"]),
    "submit": lambda each: "single" if each.settings["single_submit"] else "batch",
    "overlap": lambda each: "no" if each.settings["sequential_requests"] else "yes",
    "read GB/s": lambda each: "" if each.read is None else f"{each.read:.2f}",
    "write GB/s": lambda each: "" if each.write is None else f"{each.write:.2f}",
}


def _words(outcome: Outcome) -> str:
    return ", ".join(f"{name} {text(outcome)}" for name, text in _COLUMNS.items() if text(outcome))


def _show(outcomes: Sequence[Outcome], chosen: Outcome) -> None:
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
