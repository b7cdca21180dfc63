"""A directory that one process makes, such as a tool's output: filled in a hidden place, vouched for, swapped in."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.storage.block_writer import BLOCK, PIECE, FileFacts, RunningSums
from deepspeed.checkpoint.storage.commit import Staging, files_in, leftovers
from deepspeed.checkpoint.storage.durable import explain
from deepspeed.checkpoint.storage.manager import check_directory
from deepspeed.checkpoint.storage.manifest import Manifest
from deepspeed.errors import UsageError
from deepspeed.trust import open_regular


def new_directory(output: object, reads: Sequence[Path]) -> Path:
    """Where a tool is to write: a directory that is not there or empty, apart from everything that the tool reads."""
    check_directory(output, "the output")
    target = Path(os.path.realpath(str(output)))
    for source in reads:
        origin = Path(os.path.realpath(source))
        if target == origin or target in origin.parents or origin in target.parents:
            raise UsageError(
                f"the output {output} is {origin}, which is read, or lies inside or around it. A checkpoint that is "
                "converted stays as it is: name a directory elsewhere"
            )
    if target.exists() and not target.is_dir():
        raise UsageError(f"the output {output} is a file; name a directory that does not exist, or an empty one")
    if target.is_dir() and {path.name for path in target.iterdir()} - {left.path.name for left in leftovers(target)}:
        raise UsageError(
            f"the output {output} is a directory with something in it. Name one that does not exist, or an empty one, "
            "so that what is there and what is written do not mix"
        )
    return target


@contextlib.contextmanager
def publishing(
    target: Path,
    form: str,
    world: int,
    *,
    facts: Mapping[str, Any] | None = None,
    latest: str | None = None,
    scripts: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """A hidden directory to fill; it becomes `target`, with a manifest, when the block ends, and vanishes if it fails.

    `latest`: the file beside `target` that is to name it.
    """
    absent = [folder for folder in target.parents if not folder.exists()]
    token = uuid.uuid4().hex[:12]
    staging = Staging(target.parent, target.name, token)
    try:
        staging.open()
        yield staging.path
        files = {name: _vouch(staging.path / name) for name in sorted(files_in(staging.path))}
        staging.seal(Manifest(target.name, form, world, files, {**(facts or {}), "save": token}))
        staging.publish(latest, scripts)
    except BaseException as error:
        staging.discard()
        for folder in absent:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise explain(error, target) from error
        raise


def _vouch(path: Path) -> FileFacts:
    """Force a file to the disk and sum what it holds."""
    sums, size = RunningSums(BLOCK), 0
    with open(open_regular(path), "rb") as file:
        while data := file.read(PIECE):
            sums.add(data)
            size += len(data)
        os.fsync(file.fileno())
    return FileFacts(size, sums.finish(), BLOCK)
