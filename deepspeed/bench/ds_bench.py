"""`ds_bench`: collectives over sizes, under any launcher, or under `deepspeed` if there is none."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from rich.console import Console
from rich.text import Text

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.bench.operations import OPERATIONS, BenchSetting, Sample, sweep
from deepspeed.comm.codec import BLOCKS, SIGN, codec_of
from deepspeed.comm.discover import ALONE, discover
from deepspeed.comm.init import DEFAULT_PORT
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.io.ds_io import count
from deepspeed.io.trial import parse_size, show_size
from deepspeed.launcher import runner
from deepspeed.launcher.arguments import HelpFormatter
from deepspeed.launcher.console import emit, plain_table

PICTURES = (".png", ".svg", ".pdf")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
_CODECS = (*BLOCKS, SIGN.name)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the words that are not among them."""
    parser = argparse.ArgumentParser(
        prog="ds_bench",
        description="How fast ranks exchange bytes. Started alone, it starts ranks with `deepspeed`, whose options "
        "(--num_gpus, --hostfile, --include, --launcher, ...) it takes too; under a launcher it is one of the ranks.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_argument_group("operations (all of them if none is given)").add_argument
    for operation in OPERATIONS.values():
        which(f"--{operation.name.replace('_', '-')}", action="store_true", help=operation.about)
    add = parser.add_argument_group("measurements").add_argument
    add("--min-size", type=parse_size, default="1K", help="bytes of the smallest tensor")
    add("--max-size", type=parse_size, default="64M", help="bytes of the largest one")
    add("--factor", type=_factor, default=4, help="from one size to the next")
    add("--trials", type=count, default=20, help="measured calls of each size")
    add("--warmups", type=count, default=5, help="calls before those")
    add("--dtype", choices=_DTYPES, default="float32", help="kind of the elements")
    add("--codec", choices=_CODECS, default=None, help="send tensors as these codes; the time is with both ways")
    add("--backend", default=None, help="of torch.distributed, such as nccl or gloo; the accelerator's if not given")
    add("--dist", choices=("deepspeed", "torch"), default="deepspeed", help="whose functions are called")
    add("--async-op", action="store_true", help="begin each call and wait for it, instead of a call that waits")
    show = parser.add_argument_group("results").add_argument
    show("--bw-unit", choices=("GBps", "Gbps"), default="GBps", help="gigabytes or gigabits per second, of 10^9")
    show("--json", action="store_true", help="print one JSON object instead of tables")
    show("--plot", type=_picture, default=None, metavar="FILE", help=f"draw a picture too ({', '.join(PICTURES)})")
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)  # what launchers add
    args, rest = parser.parse_known_args(argv)
    if args.min_size > args.max_size:
        parser.error(f"--min-size {args.min_size} is larger than --max-size {args.max_size}")
    chosen = [name for name in OPERATIONS if getattr(args, name)]
    args.operations = chosen or [name for name in OPERATIONS if args.codec is None or OPERATIONS[name].coded]
    args.element = getattr(torch, args.dtype)
    if args.codec is not None:
        _check_codes(parser, args)
    return args, rest


def _check_codes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    missing = [name for name in args.operations if OPERATIONS[name].coded is None]
    if missing:
        able = ", ".join(name for name, operation in OPERATIONS.items() if operation.coded is not None)
        parser.error(f"--codec {args.codec}: {', '.join(missing)} sends no codes; choose among {able}")
    if not args.element.is_floating_point:
        parser.error(f"--codec {args.codec} encodes floating-point numbers; found --dtype {args.dtype}")
    if args.async_op:
        parser.error(f"--codec {args.codec} decodes what has come and cannot be combined with --async-op")


def words_of(args: argparse.Namespace) -> list[str]:
    """The options as words again, for the ranks."""
    words = [f"--{name.replace('_', '-')}" for name in args.operations]
    for name in (
        "min_size",
        "max_size",
        "factor",
        "trials",
        "warmups",
        "dtype",
        "codec",
        "backend",
        "dist",
        "bw_unit",
        "plot",
    ):
        value = getattr(args, name)
        if value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    return [*words, *(f"--{name.replace('_', '-')}" for name in ("async_op", "json") if getattr(args, name))]


def sizes_of(args: argparse.Namespace) -> list[int]:
    """The sizes to measure, from the smallest to the largest, which is always among them."""
    sizes, size = [], args.min_size
    while size < args.max_size:
        sizes.append(size)
        size *= args.factor
    return [*sizes, args.max_size]


def _factor(text: str) -> int:
    number = count(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 2 or more")
    return number


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a file that ends with {', '.join(PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install matplotlib")
    return path


# ---- results

_BAR = 24
_COLOURS = ("#3b76c4", "#d9622b", "#4c9a52", "#8d5bb5", "#b3923b", "#4aa5a8", "#c25a7c")
_MARKERS = "osD^vPX"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What all measurements of a run have in common."""

    ranks: int
    hosts: int
    backend: str
    device: str
    dtype: str
    trials: int
    unit: str
    codec: str | None = None

    def rate(self, bytes_per_second: float) -> float:
        """In the unit that was asked for."""
        return bytes_per_second * (8 if self.unit == "Gbps" else 1) / 1e9

    @property
    def label(self) -> str:
        """The unit as people write it."""
        return {"GBps": "GB/s", "Gbps": "Gb/s"}[self.unit]

    @property
    def title(self) -> str:
        """One line about the run."""
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        codes = "" if self.codec is None else f" as {self.codec} codes"
        return f"{self.ranks} ranks on {hosts}, {self.backend} on {self.device}, {self.dtype}{codes}"


def draw_table(console: Console, operation: str, samples: Sequence[Sample], setting: RunFacts) -> None:
    """The sizes of one operation; the bar is the bus bandwidth, the longest that of the fastest size."""
    table = plain_table("bytes", "time", f"algorithm {setting.label}", f"bus {setting.label}", "")
    for column in table.columns[:4]:
        column.justify, column.min_width = "right", 9  # tables of several operations stand below each other
    best = max(sample.bus for sample in samples)
    for sample in samples:
        length = round(_BAR * sample.bus / best)
        rates = (f"{setting.rate(value):.3g}" for value in (sample.algorithm, sample.bus))
        table.add_row(show_size(sample.nbytes), _time(sample.seconds), *rates, Text("#" * length, style="cyan"))
    console.print(Text(operation, style="bold cyan"))
    console.print(table, highlight=False)
    console.print()


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def draw_picture(file: Path, samples: Sequence[Sample], setting: RunFacts) -> None:
    """Bus bandwidth and time of every operation over the size, side by side."""
    from matplotlib.figure import Figure  # optional, and slow to import
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, name in enumerate(dict.fromkeys(sample.operation for sample in samples)):
        own = [sample for sample in samples if sample.operation == name]
        sizes = [sample.nbytes for sample in own]
        style: dict[str, Any] = {"color": _COLOURS[place], "marker": _MARKERS[place], "markersize": 4.5, "label": name}
        left.plot(sizes, [setting.rate(sample.bus) for sample in own], **style)
        right.plot(sizes, [sample.seconds * 1e6 for sample in own], **style)
    for axes, label in ((left, f"bus bandwidth ({setting.label})"), (right, "time (µs)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_size(round(size))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("bytes")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.suptitle(f"ds_bench: {setting.title}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(file)


def as_json(samples: Sequence[Sample], absent: Mapping[str, str], setting: RunFacts) -> dict[str, Any]:
    """Everything; bandwidths are in bytes per second whatever the unit of the tables."""
    return {
        "setting": {name: value for name, value in asdict(setting).items() if name != "unit"},
        "results": [asdict(sample) for sample in samples],
        "unavailable": dict(absent),
    }


# ---- the command

_MODULE = "deepspeed.bench"
_LARGEST = 2  # tensors of the largest size that an operation holds at once


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status. Without a launcher, start one, which ends the process if a rank fails."""
    args, rest = parse(argv)
    try:
        if (
            discover(os.environ, port=DEFAULT_PORT, need_master=False).source == ALONE
        ):  # no launcher started this process
            _launch(args, rest)
            return 0
        if rest:
            raise UsageError(
                f"{' '.join(rest)}: no options of ds_bench, and a launcher has started this process already"
            )
        return _run(args)
    except DeepSpeedError as error:
        sys.stderr.write(f"ds_bench: error: {error}\n")
        return 2
    finally:
        if comm.is_initialized():
            comm.destroy_process_group()


def _launch(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Start ranks of this program: the words that it does not know are the launcher's."""
    words = [*rest, "--module", "--no_local_rank", _MODULE, *words_of(args)]
    script = runner.parse_args(words, prog="ds_bench").user_script
    if script != _MODULE:
        raise UsageError(f"found {script!r}, which is no option of ds_bench or of the launcher")
    runner.main(words)


def _run(args: argparse.Namespace) -> int:
    accelerator = get_accelerator()
    comm.init_distributed(args.backend, verbose=False)
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    world, rank = comm.get_world_size(), comm.get_rank()
    if world < 2:
        raise UsageError("there is one rank, which has nobody to send to; start two or more, such as --num_gpus 2")
    device = comm.group_device()
    _require_memory(args.max_size, device)
    module = comm if args.dist == "deepspeed" else td
    codec = None if args.codec is None else codec_of(args.codec)
    room = BenchSetting(None, world, rank, args.element, device, module, args.async_op, codec)
    setting = _setting(args, world, device)
    samples: list[Sample] = []
    absent: dict[str, str] = {}
    table = rank == 0 and not args.json
    if table:
        emit(f"{setting.title}\n\n")
    for name in args.operations:
        found = list(sweep([name], sizes_of(args), room, trials=args.trials, warmups=args.warmups))
        own = [sample for sample in found if isinstance(sample, Sample)]
        samples += own
        absent |= dict(each for each in found if isinstance(each, tuple))
        if table and own:
            emit(partial(draw_table, operation=name, samples=own, setting=setting))
        elif table:
            emit(f"{name}: not by {setting.backend}: {absent[name]}\n\n")
    if rank == 0:
        if args.json:
            emit(json.dumps(as_json(samples, absent, setting), indent=2) + "\n")
        if args.plot is not None and samples:
            draw_picture(args.plot, samples, setting)
    return 0 if samples else 1


def _setting(args: argparse.Namespace, world: int, device: torch.device) -> RunFacts:
    names: list[str] = [""] * world
    comm.all_gather_object(names, socket.gethostname())
    backend = str(td.get_backend())
    unit = args.bw_unit
    return RunFacts(world, len(set(names)), backend, device.type, args.dtype, args.trials, unit, args.codec)


def _require_memory(size: int, device: torch.device) -> None:
    """All ranks must stop alike, so that they compare what each has."""
    if device.type == "cpu":
        return  # what the host has free is shared by its ranks, and swapping tells by itself
    free = torch.tensor([get_accelerator().available_memory()], dtype=torch.int64, device=device)
    comm.all_reduce(free, op=comm.ReduceOp.MIN)
    if _LARGEST * size > int(free.item()):
        raise UsageError(
            f"--max-size {size} needs {_LARGEST * size} bytes of the device, and a rank has {int(free.item())} free; "
            "give a smaller one"
        )
