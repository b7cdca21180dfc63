"""`inspect` and `verify`: what is in a checkpoint, and is every byte what was written."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.guard import reading
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.checkpoint.storage.manager import check_directory
from deepspeed.checkpoint.tools.terminal import shown, tell

__all__ = ["inspect", "verify"]


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
