"""`python -m deepspeed.checkpoint inspect|verify|convert DIR`: look into checkpoints, check them, change their form."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from deepspeed.checkpoint.formats.consolidate import save_checkpoint_weights
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.native import writer as native
from deepspeed.checkpoint.formats.reshard import state_of
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.universal.convert import convert as to_universal
from deepspeed.checkpoint.formats.zero_files import writer
from deepspeed.checkpoint.formats.zero_files.class_stand_ins import with_classes
from deepspeed.checkpoint.progress import bar
from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.zero_to_fp32 import DTYPES
from deepspeed.errors import DeepSpeedError

__all__ = ["main"]

_FORMATS = ("fp32", "fp16", "bf16", "universal", "deepspeed", "native")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return ""


def _facts(path: Path, source: Source) -> Table:
    small = source.small
    trained = sum(source.shapes[name].numel() for names, _ in source.groups for name in names)
    total = sum(shape.numel() for name, shape in source.shapes.items() if name not in source.buffers)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "checkpoint": str(path),
        "format": source.format,
        "ranks": f"{source.world}",
        "step": f"{small.counters.global_steps} ({small.counters.skipped_steps} skipped)",
        "samples": f"{small.counters.global_samples}",
        "parameters": f"{total:,} in {len(source.shapes) - len(source.buffers)} tensors, {trained:,} trained",
        "buffers": f"{len(source.buffers)}",
        "tied": ", ".join(f"{alias} = {owner}" for alias, owner in source.aliases.items()) or "none",
        "loss scale": "none" if small.loss_scale is None else f"{small.loss_scale.get('cur_scale')}",
        "client state": ", ".join(map(str, small.client_state)) or "none",
        "size": f"{_size(sum((path / name).stat().st_size for name in source.files))} in {len(source.files)} files",
    }
    for key, value in rows.items():
        table.add_row(f"[bold]{key}[/bold]", value)
    return table


def _tensors(source: Source) -> Table:
    group_of = {name: str(place) for place, (names, _) in enumerate(source.groups) for name in names}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("tensor", "shape", "dtype", "group", "holds"):
        table.add_column(heading, overflow="fold")
    for name, shape in source.shapes.items():
        kind = "buffer" if name in source.buffers else group_of.get(name, "frozen" if source.groups else "")
        holds = ", ".join(item for item in source.kinds(name) if item != "param")
        dtype = str(source.dtype(name) or "").removeprefix("torch.")
        table.add_row(name, "×".join(map(str, shape)) or "scalar", dtype, kind, "" if kind == "buffer" else holds)
    return table


def _inspect(options: argparse.Namespace, console: Console) -> int:
    path = find_tag(options.directory, options.tag)
    source = open_checkpoint(path)
    console.print(_facts(path, source))
    if not options.short:
        console.print()
        console.print(_tensors(source))
    problems = manifest.check(path) if (path / manifest.NAME).exists() else []
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
    return 1 if problems else 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    path = find_tag(options.directory, options.tag)
    if not (path / manifest.NAME).exists():
        source = open_checkpoint(path)
        for name in source.shapes:
            for kind in source.kinds(name):
                source.read(name, kind)
        console.print(f"{path}: every tensor can be read; there is no manifest, so bytes cannot be compared")
        return 0
    problems = manifest.verify(path)
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
    console.print(f"{path}: {'damaged' if problems else 'whole, every byte is what was written'}")
    return 1 if problems else 0


def _convert(options: argparse.Namespace, console: Console) -> int:
    path = find_tag(options.directory, options.tag)
    output = Path(options.output)
    if options.to == "universal":
        with bar("parameters") as progress:
            to_universal(path, output, progress=progress)
        return 0
    source = open_checkpoint(path)
    if options.to in DTYPES:
        with bar("bytes") as progress:
            plan = save_checkpoint_weights(
                source,
                output,
                max_shard_size=options.max_shard_size,
                safe=not options.torch,
                dtype=DTYPES[options.to],
                progress=progress,
            )
        console.print(f"{output}: {', '.join([*plan.shards, *([plan.index] if plan.index else [])])}")
        return 0
    return _rewrite(source, output, options)


def _rewrite(source: Source, output: Path, options: argparse.Namespace) -> int:
    """The same state as the files of another topology."""
    world = source.world if options.ranks is None else options.ranks
    stage = source.stage if options.stage is None else options.stage
    make = native.files if options.to == "native" else writer.files
    with bar("ranks") as progress, torch.no_grad():
        for rank in range(world):
            files = make(state_of(source, stage=stage, rank=rank, world=world))
            optimizer = {name: value for name, value in files.objects.items() if name.endswith("_optim_states.pt")}
            files.write(output)
            if options.with_classes:
                for name, value in optimizer.items():
                    with_classes(value, output / name)
            progress(rank + 1, world)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m deepspeed.checkpoint", description="Look into checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("inspect", "what is in it"),
        ("verify", "is every byte what was written"),
        ("convert", "change its form"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("directory", help="folder of a tag, or of tags (then of `latest`)")
        command.add_argument("--tag", help="which tag")
        if name == "inspect":
            command.add_argument("--short", action="store_true", help="without the list of tensors")
        if name == "convert":
            command.add_argument("output", help="folder to write")
            command.add_argument("--to", choices=_FORMATS, default="fp32", help="weights in a dtype, or a checkpoint")
            command.add_argument("--max_shard_size", default="5GB", help="bytes of a file of weights")
            command.add_argument("--torch", action="store_true", help="weights as torch files, not safetensors")
            command.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage of a checkpoint")
            command.add_argument("--ranks", type=int, help="ranks of a checkpoint")
            command.add_argument(
                "--with-classes",
                action="store_true",
                help="store the loss scaler as DeepSpeed's object, which DeepSpeed itself needs at stage 3 in fp16",
            )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit status."""
    options = _parser().parse_args(arguments)
    console = Console(soft_wrap=True)
    run = {"inspect": _inspect, "verify": _verify, "convert": _convert}[options.command]
    try:
        return run(options, console)
    except DeepSpeedError as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]{error}[/red]", highlight=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
