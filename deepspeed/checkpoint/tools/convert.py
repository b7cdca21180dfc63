"""`convert`: a checkpoint in another form, in a directory of its own that appears when all of it is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.checkpoint.formats.consolidate import save_checkpoint_weights, scripts
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.guard import reading
from deepspeed.checkpoint.formats.native import writer as native
from deepspeed.checkpoint.formats.reshard import state_of
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.universal.convert import convert as to_universal
from deepspeed.checkpoint.formats.zero_files import writer
from deepspeed.checkpoint.formats.zero_files.class_stand_ins import with_classes
from deepspeed.checkpoint.storage.commit import LATEST
from deepspeed.checkpoint.storage.manager import check_directory, default_tag
from deepspeed.checkpoint.storage.publishing import new_directory, publishing
from deepspeed.checkpoint.tools.terminal import bar, tell
from deepspeed.checkpoint.zero_to_fp32 import DTYPES
from deepspeed.trust import flaw_of_name

__all__ = ["CHECKPOINTS", "WEIGHTS", "Conversion", "convert"]

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
        plan = save_checkpoint_weights(
            source,
            folder,
            max_shard_size=wanted.max_shard_size,
            safe=wanted.safe,
            dtype=DTYPES[wanted.to],
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
