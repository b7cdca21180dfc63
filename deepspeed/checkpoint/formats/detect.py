"""`open_checkpoint`: a directory's format, found by the files that lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepspeed.checkpoint.formats.checked_files import Opener
from deepspeed.checkpoint.formats.guard import reading
from deepspeed.checkpoint.formats.native.reader import NativeSource
from deepspeed.checkpoint.formats.native.writer import INDEX
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.universal.reader import UniversalSource
from deepspeed.checkpoint.formats.zero_files.file_names import sort_files
from deepspeed.checkpoint.formats.zero_files.reader import DeepSpeedSource, is_deepspeed
from deepspeed.checkpoint.storage.commit import LATEST
from deepspeed.checkpoint.storage.locate import read_latest
from deepspeed.errors import CheckpointError
from deepspeed.trust import inside

__all__ = ["find_tag", "open_checkpoint"]


def open_checkpoint(
    directory: str | Path,
    *,
    mp_rank: int = 0,
    order: Sequence[Sequence[str]] | None = None,
    verify: bool = True,
    partial: bool = False,
    near: int = 0,
) -> Source:
    """The checkpoint in a tag's directory.

    `order`: the names in each parameter group of the optimizer, which only stage 0 of DeepSpeed itself needs.
    `verify`: compare what is read with the manifest, where there is one. `partial`: files of other ranks may be absent,
    because they lie on other nodes. `near`: the data-parallel rank that reads, whose own files are preferred.
    """
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory")
    if (path / INDEX).exists():
        return NativeSource(path, opener=Opener(path, verify=verify))
    if (path / "zero").is_dir():
        return UniversalSource(path, mp_rank, opener=Opener(path, verify=verify))
    with reading(path):
        names = sorted(entry.name for entry in path.iterdir())
    if is_deepspeed(sort_files(names)):
        return DeepSpeedSource(path, mp_rank, order, opener=Opener(path, verify=verify), partial=partial, near=near)
    raise CheckpointError(
        f"{path} holds no checkpoint; it has {', '.join(names[:5]) or 'nothing'}. Expected DeepSpeed's "
        f"*_model_states.pt, a universal checkpoint's zero/, or {INDEX}"
    )


def find_tag(directory: str | Path, tag: str | None = None) -> Path:
    """The tag's directory: of `tag`, of `latest`, or `directory` itself where it is one already."""
    path = Path(directory)
    named = read_latest(path) if tag is None else tag
    found = path if named is None else inside(path, named, "the tag" if tag is not None else f"{path / LATEST} names")
    if not found.is_dir():
        known = sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []
        raise CheckpointError(f"{found} does not exist; {path} has {', '.join(known[:20]) or 'no tags'}")
    return found
