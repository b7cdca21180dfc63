"""`inspect`, `verify` and `convert`: look into checkpoints, check them, change their form; what they read stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from deepspeed.checkpoint.formats.adapters import state_of
from deepspeed.checkpoint.formats.consolidate import DTYPES, scripts, weights_of, write_shards
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.guard import reading
from deepspeed.checkpoint.formats.native import writer as native
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.universal.convert import convert as to_universal
from deepspeed.checkpoint.formats.zero_files import writer
from deepspeed.checkpoint.formats.zero_files.flat_writer import with_classes
from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.storage.commit import LATEST
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.checkpoint.storage.manager import check_directory, default_tag
from deepspeed.checkpoint.storage.publishing import new_directory, publishing
from deepspeed.errors import printable
from deepspeed.trust import flaw_of_name

_EVERY = 10.0  # seconds between lines about progress in a file


def shown(value: object, style: str = "") -> Text:
    """A text for a table or a line; on one line."""
    return Text(printable(value).replace("\n", "\\n"), style)


def tell(value: object, *, style: str = "", stderr: bool = False) -> None:
    """Print a line."""
    Console(stderr=stderr, soft_wrap=True).print(shown(value, style), highlight=False)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function (done, of how many) that moves a bar on standard error, or writes lines where that is a file."""
    console = Console(stderr=True)
    last = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def move(done: int, total: int) -> None:
            nonlocal last
            progress.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() >= last + _EVERY:
                last = time.monotonic()
                tell(f"{what}: {done} of {total}", stderr=True)

        yield move


def inspect(directory: str, tag: str | None = None, *, short: bool = False) -> int:
    """Show what is in a checkpoint; the exit status says whether files are missing or cut."""
    check_directory(directory, "the directory")
    path = find_tag(directory, tag)
    console = Console(soft_wrap=True)
    with reading(path):
        source = open_checkpoint(path)
        tables = [_facts(path, source)] if short else [_facts(path, source), _tensors(source)]
    for place, table in enumerate(tables):
        if place:
            console.print()
        console.print(table)
    problems = manifest.check(path) if (path / manifest.NAME).exists() else []
    for problem in problems:
        tell(problem, style="red")
    return 1 if problems else 0


def verify(directory: str, tag: str | None = None) -> int:
    """Read every byte of a checkpoint and compare it with the manifest, where there is one."""
    check_directory(directory, "the directory")
    path = find_tag(directory, tag)
    if not (path / manifest.NAME).exists():
        with reading(path):
            source = open_checkpoint(path)
            for name in source.shapes:
                for kind in source.kinds(name):
                    source.read(name, kind)
        tell(f"{path}: every tensor can be read; there is no manifest, so bytes cannot be compared")
        return 0
    problems = manifest.verify(path)
    for problem in problems:
        tell(problem, style="red")
    tell(f"{path}: {'damaged' if problems else 'whole, every byte is what was written'}")
    return 1 if problems else 0


def _facts(path: Path, source: Source) -> Table:
    small = source.small
    trained = sum(source.shapes[name].numel() for names, _ in source.groups for name in names)
    total = sum(shape.numel() for name, shape in source.shapes.items() if name not in source.buffers)
    scale = "none" if small.loss_scale is None else small.loss_scale.get("cur_scale")
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
        "loss scale": f"{scale}",
        "client state": ", ".join(map(str, small.client_state)) or "none",
        "size": f"{gibibytes(sum((path / name).stat().st_size for name in source.files))} in {len(source.files)} files",
    }
    for key, value in rows.items():
        table.add_row(shown(key, "bold"), shown(value))
    return table


def _tensors(source: Source) -> Table:
    group_of = {name: str(place) for place, (names, _) in enumerate(source.groups) for name in names}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("tensor", "shape", "dtype", "group", "holds"):
        table.add_column(heading, overflow="fold")
    for name, shape in source.shapes.items():
        kind = "buffer" if name in source.buffers else group_of.get(name, "frozen" if source.groups else "")
        holds = ", ".join(str(item) for item in source.kinds(name) if item != "param")
        dtype = str(source.dtype(name) or "").removeprefix("torch.")
        cells = (name, "×".join(map(str, shape)) or "scalar", dtype, kind, "" if kind == "buffer" else holds)
        table.add_row(*map(shown, cells))
    return table


WEIGHTS = ("fp32", "fp16", "bf16")
CHECKPOINTS = ("universal", "deepspeed", "native")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is wanted."""

    directory: str
    output: str
    """Of weights the directory of the files; of a checkpoint the directory that holds the tag and `latest`."""
    to: str = "fp32"
    tag: str | None = None
    max_shard_size: int | str = "5GB"
    safe: bool = True
    stage: int | None = None
    ranks: int | None = None
    with_classes: bool = False


def convert(wanted: Conversion) -> None:
    """Write the checkpoint in its new form; what is read stays as it is, and what is there already is not touched."""
    check_directory(wanted.directory, "the directory")
    path = find_tag(wanted.directory, wanted.tag)
    output = new_directory(wanted.output, [Path(wanted.directory), path])
    with reading(path):
        source = open_checkpoint(path)
        target = output / _tag(path, source)
        if wanted.to in WEIGHTS:
            _weights(source, output, wanted)
        elif wanted.to == "universal":
            with bar("parameters") as progress:
                to_universal(path, target, progress=progress)
            tell(f"{target}")
        else:
            _checkpoint(source, target, wanted)


def _tag(path: Path, source: Source) -> str:
    name = path.resolve().name
    usable = flaw_of_name(name, hidden=False) is None and not name.startswith("latest")
    return name if usable else default_tag(source.small.counters.global_steps)


def _weights(source: Source, output: Path, wanted: Conversion) -> None:
    with bar("bytes") as progress, publishing(output, "weights", 1) as folder:
        dtype = DTYPES[wanted.to]
        plan = write_shards(
            folder,
            weights_of(source, dtype),
            source.aliases,
            limit=wanted.max_shard_size,
            safe=wanted.safe,
            dtype=dtype,
            progress=progress,
        )
    tell(f"{output}: {', '.join([*plan.shards, *([plan.index] if plan.index else [])])}")


def _checkpoint(source: Source, target: Path, wanted: Conversion) -> None:
    """The same state as the files of another topology."""
    world = source.world if wanted.ranks is None else wanted.ranks
    stage = source.stage if wanted.stage is None else wanted.stage
    make = native.files if wanted.to == "native" else writer.files
    beside = scripts() if wanted.to == "deepspeed" and stage else {}
    facts = {"stage": stage, "global_steps": source.small.counters.global_steps}
    made = publishing(target, wanted.to, world, facts=facts, latest=LATEST, scripts=beside)
    with bar("ranks") as progress, torch.no_grad(), made as folder:
        for rank in range(world):
            files = make(state_of(source, stage=stage, rank=rank, world=world))
            optimizer = {name: value for name, value in files.objects.items() if name.endswith("_optim_states.pt")}
            files.write(folder)
            if wanted.with_classes:
                for name, value in optimizer.items():
                    with_classes(value, folder / name)
            progress(rank + 1, world)
    tell(f"{target}")
