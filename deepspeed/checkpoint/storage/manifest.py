"""The manifest of a checkpoint: which files belong to it, their sizes and checksums; written last, checked on load.

[Note: what a reader checks] `check` compares names and sizes and reads no data. `verify` reads every byte. In between,
a reader that takes a part of a file goes through `FileCheck`, which compares the blocks under that range, each
once. The manifest is compared with its own canonical text, so that no byte of it can change unnoticed.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed._package import __version__
from deepspeed.checkpoint.storage.block_reader import FileCheck, FileProblem, odd_size
from deepspeed.checkpoint.storage.block_writer import KINDS, FileFacts
from deepspeed.checkpoint.storage.durable import explain, write_text
from deepspeed.errors import CheckpointError
from deepspeed.trust import flaw_of_name, read_regular

NAME = "manifest.json"
_LARGEST = 64 * 2**20  # bytes of a manifest: of checkpoints up to some ten terabytes
_LARGEST_BLOCK = 64 * 2**20  # of a file, which readers hold in memory
_VERSION = 2  # the first knew CRC-32 alone; a manifest is of the lowest version that can say what it says


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    tag: str
    format: str
    world_size: int
    files: Mapping[str, FileFacts]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More that the writer wants to be known, as JSON can hold it."""
    saved_at: float = field(default_factory=time.time)
    """Seconds since 1970: the order among checkpoints."""
    written_by: str = f"deepspeed {__version__}"

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(facts.size for facts in self.files.values())

    def text(self) -> str:
        """The only spelling of this manifest."""
        body = {
            "version": 1 if all(facts.kind == "crc32" for facts in self.files.values()) else _VERSION,
            "tag": self.tag,
            "format": self.format,
            "world_size": self.world_size,
            "saved_at": self.saved_at,
            "written_by": self.written_by,
            "facts": dict(self.facts),
            "files": {name: _to_json(facts) for name, facts in sorted(self.files.items())},
        }
        line = json.dumps(body, sort_keys=True)
        whole = {"checksum": f"{zlib.crc32(line.encode()):08x}", "manifest": body}
        return json.dumps(whole, sort_keys=True, indent=1) + "\n"


def _to_json(facts: FileFacts) -> dict[str, Any]:
    return {"size": facts.size, "block": facts.block, facts.kind: "".join(f"{value:08x}" for value in facts.sums)}


def _from_json(entry: Mapping[str, Any]) -> FileFacts:
    size, block = entry["size"], entry["block"]
    if type(size) is not int or type(block) is not int or size < 0 or not 0 < block <= _LARGEST_BLOCK:
        raise ValueError(f"{size!r:.20} bytes in blocks of {block!r:.20}")
    kind = next((kind for kind in KINDS if kind in entry), "")
    text = entry[kind]
    sums = tuple(int(text[place : place + 8], 16) for place in range(0, len(text), 8))
    if len(sums) != -(-size // block):
        raise ValueError(f"{len(sums)} checksums for {size} bytes in blocks of {block}")
    return FileFacts(size, sums, block, kind)


def _named(files: Mapping[str, Any]) -> dict[str, FileFacts]:
    """The files of a manifest, whose names stay inside the checkpoint's folder."""
    for name in files:
        flaw = flaw_of_name(name)
        if flaw is None and (os.path.normpath(name) != name or name == NAME):
            flaw = "is not the shortest name of a file, or the manifest's own"
        if flaw is not None:
            raise ValueError(f"the file name {name!r:.200} {flaw}")
    return {name: _from_json(entry) for name, entry in files.items()}


def merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, FileFacts]:
    """The files of all ranks, from what `entries` gave on each."""
    return {name: _from_json(entry) for part in parts for name, entry in part.items()}


def entries(files: Mapping[str, FileFacts]) -> dict[str, Any]:
    """Files as values that travel between ranks as JSON."""
    return {name: _to_json(facts) for name, facts in files.items()}


def write(directory: str | os.PathLike[str], manifest: Manifest) -> None:
    """Make the manifest durable; every file in it has to be so already."""
    write_text(Path(directory) / NAME, manifest.text())


def read(directory: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a checkpoint, None where there is none; a damaged one is a CheckpointError."""
    path = Path(directory) / NAME
    try:
        data = read_regular(path, _LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain(error, path) from error
    damaged = f"{path}: the manifest is damaged"
    try:
        found = json.loads(data)["manifest"]
        version = found["version"]
        if type(version) is int and version > _VERSION:
            raise CheckpointError(
                f"{path}: written as version {version} by {found.get('written_by')!r:.100}; this library reads up to "
                f"version {_VERSION}. Update it to load this checkpoint."
            )
        manifest = _parse(found)
        spelled = manifest.text().encode()
    # Whatever a file that somebody else made can hold: also numbers without end and lists in lists in lists.
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{damaged} ({len(data)} bytes, {error}). Load another checkpoint.") from error
    if spelled != data:
        raise CheckpointError(f"{damaged}: its text does not match its checksum. Load another checkpoint.")
    return manifest


def _parse(found: Mapping[str, Any]) -> Manifest:
    kinds: dict[str, tuple[type, ...]] = {
        "tag": (str,),
        "format": (str,),
        "world_size": (int,),
        "files": (dict,),
        "facts": (dict,),
        "saved_at": (int, float),
        "written_by": (str,),
    }
    for key, allowed in kinds.items():
        if type(found[key]) not in allowed:
            raise TypeError(f"{key} is {type(found[key]).__name__}, expected {allowed[0].__name__}")
    if not math.isfinite(found["saved_at"]):
        raise ValueError(f"saved_at is {found['saved_at']}")
    files = _named(found["files"])
    tag, form, world = found["tag"], found["format"], found["world_size"]
    return Manifest(tag, form, world, files, found["facts"], found["saved_at"], found["written_by"])


def _listed(directory: Path) -> tuple[Mapping[str, FileFacts], list[FileProblem]]:
    """The files that a checkpoint's manifest lists, or why it lists none."""
    try:
        manifest = read(directory)
    except CheckpointError as error:
        return {}, [FileProblem(str(directory / NAME), str(error))]
    if manifest is None:
        return {}, [FileProblem(str(directory / NAME), "there is no manifest, so nothing can be compared")]
    return manifest.files, []


def check(path: str | os.PathLike[str]) -> list[FileProblem]:
    """The cheap look at a checkpoint: is the manifest whole, are all files there with their sizes."""
    files, problems = _listed(Path(path))
    return problems or sizes(Path(path), files)


def sizes(directory: Path, files: Mapping[str, FileFacts]) -> list[FileProblem]:
    """Which files are missing or have another size than the manifest says."""
    found = ((directory / name, facts.size) for name, facts in files.items())
    return [problem for path, size in found if (problem := odd_size(path, size)) is not None]


def verify(
    directory: str | os.PathLike[str], files: Iterable[str] | None = None, *, threads: int | None = None
) -> list[FileProblem]:
    """Read every byte of a checkpoint, or of some of its files, and compare; an empty list is good news."""
    directory = Path(directory)
    known, problems = _listed(directory)
    if problems:
        return problems
    wanted = known if files is None else list(files)
    problems = [FileProblem(str(directory / name), "not in the manifest") for name in wanted if name not in known]
    listed = {name: known[name] for name in wanted if name in known}
    problems += sizes(directory, listed)
    odd = {problem.file for problem in problems}
    for name, facts in listed.items():
        if str(directory / name) not in odd:
            problems += FileCheck(directory / name, facts, threads=threads).problems(0, facts.size)
    return problems
