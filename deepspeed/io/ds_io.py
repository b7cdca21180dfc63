"""`ds_io`: how fast files are read or written in a folder."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

from deepspeed.errors import DeepSpeedError
from deepspeed.io.trial import ENGINES, Folder, Trial, parse_size, problem_of, show_size, speed, stopped_by_signals


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print GB/s; 0 if that went well."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    folders = _folders(parser, arguments)
    trial = Trial(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Trial)})
    flaw = problem_of(trial)
    if flaw:
        parser.error(flaw)
    return report_errors("ds_io", lambda: _measure(trial, folders, arguments.multi_process))


def report_errors(program: str, run: Callable[[], None]) -> int:
    """Run a program's work; what went wrong is one line on stderr, and the exit status."""
    try:
        with stopped_by_signals():
            run()
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted; its files are removed\n")
        return 130
    except (DeepSpeedError, OSError, MemoryError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 1
    return 0


def count(text: str) -> int:
    """A whole number from 1 up, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 1 up")
    return int(text)


def _measure(trial: Trial, folders: Sequence[Folder], processes: int) -> None:
    found = speed(trial, folders, processes)
    way = "read" if trial.read else "write"
    many = f", {len(folders) * processes} processes" if len(folders) * processes > 1 else ""
    sys.stdout.write(
        f"{way}: {found:.2f} GB/s  ({trial.engine}, {show_size(trial.io_size)} x {trial.counted}, blocks of "
        f"{show_size(trial.block_size)}, queue depth {trial.queue_depth}, {trial.io_parallel} "
        f"thread{'s' * (trial.io_parallel > 1)}{many})\n"
    )


def _folders(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[Folder]:
    if (arguments.folder is None) == (arguments.folder_to_device_mapping is None):
        parser.error("expected either --folder or --folder_to_device_mapping")
    if arguments.folder is not None:
        return [(arguments.folder, 0)]
    found = []
    for entry in arguments.folder_to_device_mapping:
        folder, separator, device = entry.rpartition(":")
        if not separator or not folder or not device.isdecimal():
            parser.error(f"--folder_to_device_mapping: found {entry!r}, expected FOLDER:DEVICE such as /mnt/nvme0:0")
        found.append((folder, int(device)))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_io", description="How fast files are read or written in a folder.")
    add = parser.add_argument
    add("--folder", help="where to write; a folder of its own is made there and removed")
    add("--folder_to_device_mapping", nargs="+", metavar="FOLDER:DEVICE", help="several, each with its device")
    add("--io_size", type=parse_size, required=True, help="bytes per file, such as 400M or 1G")
    add("--fast_io_size", type=parse_size, default=2**26, help="memory of the torch_fastio engine (64M)")
    add("--read", action="store_true", help="read instead of write")
    add("--multi_process", type=count, default=1, metavar="N", help="processes per folder, each with its file (1)")
    add("--block_size", type=parse_size, default=2**20, help="bytes per block (1M)")
    add("--queue_depth", type=count, default=32, help="blocks in flight (32)")
    add("--single_submit", action="store_true", help="every block is submitted alone")
    add("--sequential_requests", action="store_true", help="nothing is submitted before what is on its way is done")
    add("--validate", action="store_true", help="compare the last file with what it should be")
    add("--engine", choices=list(ENGINES), default="aio_handle", help="what reads and writes (aio_handle)")
    add("--loops", type=count, default=3, help="measured times (3)")
    add("--io_parallel", type=count, default=1, metavar="N", help="threads that share a request (1)")
    add("--gpu", action="store_true", help="move memory of the device")
    add("--use_gds", action="store_true", help="by GPUDirect Storage")
    add("--slow_bounce_buffer", action="store_true", help="memory of the host is found anew for every request")
    add("--torch_legacy_save", action="store_true", help="the format of before torch 1.6, in the torch engines")
    add("--use_accelerator_pin_memory", action="store_true", help="memory pinned by torch, not by the handle")
    add("--warmup_loops", type=_from_zero, default=1, help="times before those that are measured (1)")
    add("--include_warmup_time", action="store_true", help="measure those, too")
    add("--different_file_each_iteration", action="store_true", help="a new file for every loop")
    return parser


def _from_zero(text: str) -> int:
    return 0 if text == "0" else count(text)


if __name__ == "__main__":
    sys.exit(main())
