"""Checkpoints through a `CheckpointEngine` of the user's own: its files, the library's contents."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from deepspeed.checkpoint.formats.rank_files import Files
from deepspeed.checkpoint.storage.commit import LATEST
from deepspeed.checkpoint.storage.durable import write_tensorfile, write_text
from deepspeed.checkpoint.storage.rank_meeting import Exchange, together
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

__all__ = ["plain_copy", "save_files"]


def save_files(
    engine: CheckpointEngine, exchange: Exchange, files: Files, save_dir: Path, tag: str, *, latest: bool
) -> Path:
    """Hand this rank's files to the engine; once all ranks have, it commits, and then `latest` names the checkpoint."""
    if files.tensors:
        raise UsageError(
            "checkpoint.format is safetensors, whose files a checkpoint engine of your own cannot write: use the "
            "format deepspeed, or leave engine.checkpoint_engine as it is"
        )
    what = f"saving checkpoint {tag!r} to {save_dir} with {type(engine).__name__}"
    target = save_dir / tag
    info = CheckpointCommitInfo(tag, str(save_dir), latest)

    def write() -> None:
        engine.create(info)
        engine.set_commit_info(info)
        engine.makedirs(str(target), exist_ok=True)
        for name, value in files.objects.items():
            engine.save(value, str(target / name))
        for name, text in files.texts.items():
            write_text(target / name, text)

    def commit() -> None:
        if engine.commit(info) is False:
            raise CheckpointError(f"{type(engine).__name__}.commit refused checkpoint {tag!r} in {save_dir}")

    def publish() -> None:
        if latest and exchange.rank == 0:
            write_text(save_dir / LATEST, tag)

    with exchange.meeting(what) as meeting:
        for act in (write, commit, publish):
            together(meeting, what, act)
    return target


@contextlib.contextmanager
def plain_copy(
    engine: CheckpointEngine, exchange: Exchange, load_dir: str | os.PathLike[str], tag: str | None
) -> Iterator[tuple[Path, str] | None]:
    """The folder and tag of a copy in torch's files, which any number of ranks can read; gone afterwards.

    Each rank loads its share of the files through the engine. None if no tag is given and nothing names one.
    """
    folder = Path(load_dir)
    named = folder / LATEST
    name = tag if tag is not None else named.read_text(encoding="utf-8").strip() if named.is_file() else None
    if name is None:
        yield None
        return
    what = f"loading checkpoint {folder / name} with {type(engine).__name__}"
    with exchange.meeting(what) as meeting:
        token = meeting.say({"token": os.urandom(6).hex()})[0]["token"]
        copy = folder / f".{name.replace('/', '_')}.{token}.plain"

        def read() -> None:
            if not (folder / name).is_dir():
                raise UsageError(f"{folder / name} is no directory")
            (copy / name).mkdir(parents=True, exist_ok=True)
            files = sorted(path.name for path in (folder / name).iterdir() if path.is_file())
            for file in files[exchange.rank :: exchange.world]:
                write_tensorfile(copy / name / file, engine.load(str(folder / name / file), map_location="cpu"))

        try:
            together(meeting, what, read)
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
    try:
        yield copy, name
        with exchange.meeting(what) as meeting:
            meeting.say({})  # nobody reads any more
    finally:
        shutil.rmtree(copy, ignore_errors=True)
