"""The manifest of a checkpoint: which files belong to it, their sizes and checksums; written last, checked on load.

[Note: what a reader checks] `check` compares names and sizes and reads no data. `verify` reads every byte. In between,
a reader that maps a file and takes a part of it asks `FileCheck.require(start, stop)`, which reads the blocks under
that range, each once. The manifest is compared with its own canonical text, so that no byte of it can change unnoticed.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed._version import __version__
from deepspeed.checkpoint.storage import explain, gibibytes, write_text
from deepspeed.checkpoint.stream import FileFacts
from deepspeed.errors import CheckpointError

__all__ = ["NAME", "FileCheck", "Manifest", "Problem", "check", "entries", "merge", "read", "sizes", "verify", "write"]

NAME = "manifest.json"
_VERSION = 1
_PIECE = 2**20  # read at a time: it stays in the processor's cache between copy and sum
_AHEAD = 8  # blocks that the system is asked to fetch beyond those that are checked: readers go from front to end


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a file of a checkpoint."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


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
            "version": _VERSION,
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
    return {"size": facts.size, "block": facts.block, "crc32": "".join(f"{value:08x}" for value in facts.sums)}


def _from_json(entry: Mapping[str, Any]) -> FileFacts:
    text, size, block = entry["crc32"], int(entry["size"]), int(entry["block"])
    sums = tuple(int(text[place : place + 8], 16) for place in range(0, len(text), 8))
    if len(sums) != -(-size // block):
        raise ValueError(f"{len(sums)} checksums for {size} bytes in blocks of {block}")
    return FileFacts(size, sums, block)


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
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain(error, path) from error
    damaged = f"{path}: the manifest is damaged"
    try:
        found = json.loads(data)["manifest"]
        version = int(found["version"])
        if version > _VERSION:
            raise CheckpointError(
                f"{path}: written as version {version} by {found.get('written_by')}; this library reads up to version "
                f"{_VERSION}. Update it to load this checkpoint."
            )
        manifest = Manifest(
            found["tag"],
            found["format"],
            found["world_size"],
            {name: _from_json(entry) for name, entry in found["files"].items()},
            found["facts"],
            found["saved_at"],
            found["written_by"],
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{damaged} ({len(data)} bytes, {error}). Load another checkpoint.") from error
    if manifest.text().encode() != data:
        raise CheckpointError(f"{damaged}: its text does not match its checksum. Load another checkpoint.")
    return manifest


def check(path: str | os.PathLike[str]) -> list[Problem]:
    """The cheap look at a checkpoint: is the manifest whole, are all files there with their sizes."""
    directory = Path(path)
    try:
        manifest = read(directory)
    except CheckpointError as error:
        return [Problem(str(directory / NAME), str(error))]
    if manifest is None:
        return [Problem(str(directory / NAME), "there is no manifest")]
    return sizes(directory, manifest.files)


def sizes(directory: Path, files: Mapping[str, FileFacts]) -> list[Problem]:
    """Which files are missing or have another size than the manifest says."""
    found = ((directory / name, facts.size) for name, facts in files.items())
    return [problem for path, size in found if (problem := _size(path, size)) is not None]


def _size(path: Path, expected: int) -> Problem | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return Problem(str(path), f"missing; the manifest lists it with {expected} bytes")
    except OSError as error:
        return Problem(str(path), f"cannot be looked at: {error.strerror}")
    if size == expected:
        return None
    how = "truncated" if size < expected else "too long"
    return Problem(str(path), f"{how}: {size} bytes, the manifest says {expected}")


def verify(
    directory: str | os.PathLike[str], files: Iterable[str] | None = None, *, threads: int | None = None
) -> list[Problem]:
    """Read every byte of a checkpoint, or of some of its files, and compare; an empty list is good news."""
    directory = Path(directory)
    try:
        manifest = read(directory)
    except CheckpointError as error:
        return [Problem(str(directory / NAME), str(error))]
    if manifest is None:
        return [Problem(str(directory / NAME), "there is no manifest, so nothing can be compared")]
    wanted = list(manifest.files) if files is None else list(files)
    problems = [Problem(str(directory / name), "not in the manifest") for name in wanted if name not in manifest.files]
    listed = {name: manifest.files[name] for name in wanted if name in manifest.files}
    problems += sizes(directory, listed)
    odd = {problem.file for problem in problems}
    for name, facts in listed.items():
        if str(directory / name) not in odd:
            problems += FileCheck(directory / name, facts, threads=threads).problems(0, facts.size)
    return problems


class FileCheck:
    """Compares the blocks of one file with the manifest as they are needed, each at most once."""

    def __init__(self, path: str | os.PathLike[str], facts: FileFacts, *, threads: int | None = None) -> None:
        self.path = Path(path)
        self.facts = facts
        self._threads = threads or min(4, os.cpu_count() or 1)
        self.checked: set[int] = set()
        """Blocks that were compared and are good."""
        self._pool: ThreadPoolExecutor | None = None
        self._coming: dict[int, Future[int]] = {}
        """Sums of blocks that are likely to be asked for next."""

    def require(self, start: int, stop: int) -> None:
        """A CheckpointError that names the file and the damaged range, unless these bytes are what was written."""
        problems = self.problems(start, stop)
        if problems:
            told = "; ".join(map(str, problems))
            raise CheckpointError(
                f"{told}. The file changed after it was written. Load another checkpoint, or restore the file."
            )

    def problems(self, start: int, stop: int) -> list[Problem]:
        """What is wrong with the bytes [start, stop)."""
        if stop <= start:
            return []
        odd = _size(self.path, self.facts.size)
        if odd is not None:
            return [odd]
        block = self.facts.block
        wanted = [i for i in range(start // block, -(-min(stop, self.facts.size) // block)) if i not in self.checked]
        if not wanted:
            return []
        try:
            sums = self._read(wanted)
        except OSError as error:
            return [Problem(str(self.path), f"cannot be read: {error.strerror or error}")]
        bad = [index for index, value in zip(wanted, sums, strict=True) if value != self.facts.sums[index]]
        self.checked.update(set(wanted).difference(bad))
        return [Problem(str(self.path), text) for text in self._ranges(bad)]

    def _read(self, blocks: list[int]) -> list[int]:
        """The sums of these blocks; threads go on with those that follow, while the caller uses these."""
        block, count = self.facts.block, len(self.facts.sums)
        with open(self.path, "rb", buffering=0) as file:
            length = (blocks[-1] + 1 + _AHEAD - blocks[0]) * block
            os.posix_fadvise(file.fileno(), blocks[0] * block, length, os.POSIX_FADV_WILLNEED)
        following = range(blocks[-1] + 1, min(blocks[-1] + 1 + self._threads, count))
        if self._threads == 1 or count == 1:
            return [_sum_of(self.path, block, index) for index in blocks]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "checkpoint-verify")
        for index in (*blocks, *following):
            if index not in self._coming and index not in self.checked:
                self._coming[index] = self._pool.submit(_sum_of, self.path, block, index)
        return [self._coming.pop(index).result() for index in blocks]

    def _ranges(self, bad: list[int]) -> Iterable[str]:
        """Neighbouring blocks told as one range."""
        block, size = self.facts.block, self.facts.size
        while bad:
            count = next((n for n, index in enumerate(bad) if index != bad[0] + n), len(bad))
            first, last = bad[0] * block, min(bad[count - 1] * block + block, size)
            yield f"damaged between bytes {first} and {last} of {size} ({gibibytes(size)}): the checksum differs"
            bad = bad[count:]


def _sum_of(path: Path, block: int, index: int) -> int:
    with open(path, "rb", buffering=0) as file:
        return _sum_at(file.fileno(), block, index)


def _sum_at(descriptor: int, block: int, index: int) -> int:
    place, stop, value = index * block, (index + 1) * block, 0
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    while place < stop:
        count = os.preadv(descriptor, [view[: min(_PIECE, stop - place)]], place)
        if count == 0:
            break
        value = zlib.crc32(view[:count], value)
        place += count
    return value
