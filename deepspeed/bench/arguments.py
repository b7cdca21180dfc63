"""The options of `ds_bench`; what they do not know belongs to the launcher that starts its ranks."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from deepspeed.bench.operations import OPERATIONS
from deepspeed.io.ds_io import count
from deepspeed.io.sizes import parse_size
from deepspeed.launcher.arguments import HelpFormatter

__all__ = ["PICTURES", "parse", "sizes_of", "words_of"]

PICTURES = (".png", ".svg", ".pdf")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")


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
    args.operations = chosen or list(OPERATIONS)
    args.element = getattr(torch, args.dtype)
    return args, rest


def words_of(args: argparse.Namespace) -> list[str]:
    """The options as words again, for the ranks."""
    words = [f"--{name.replace('_', '-')}" for name in args.operations]
    for name in ("min_size", "max_size", "factor", "trials", "warmups", "dtype", "backend", "dist", "bw_unit", "plot"):
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
