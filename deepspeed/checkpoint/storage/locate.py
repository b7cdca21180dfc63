"""Which checkpoint to load, why others are passed over, and which of them to remove."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.checkpoint.storage import manifest as manifests
from deepspeed.checkpoint.storage.block_reader import FileProblem
from deepspeed.checkpoint.storage.commit import LATEST, LATEST_UNIVERSAL, leftovers, remove
from deepspeed.checkpoint.storage.durable import explain, is_whole
from deepspeed.checkpoint.storage.manifest import Manifest
from deepspeed.errors import CheckpointError
from deepspeed.trust import flaw_of_name, open_regular, read_regular

_DEPTH = 4  # parts of a tag that are looked for
_MOST = 10_000  # folders that a look at a directory opens
_LONGEST = 4096  # bytes of `latest`
_CLOCKS = 3600.0  # seconds by which the clocks of hosts may differ


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint directory, as far as names and sizes tell."""

    tag: str
    path: Path
    manifest: Manifest | None
    """None for a checkpoint that DeepSpeed or an older tool wrote: its bytes cannot be verified."""
    problems: tuple[FileProblem, ...]
    saved_at: float

    @property
    def save(self) -> str:
        """The same for all parts of one save, wherever they lie; empty if unknown."""
        return "" if self.manifest is None else str(self.manifest.facts.get("save", ""))

    def is_ahead(self, now: float) -> bool:
        """It says that it was saved after `now`, by more than clocks differ."""
        return self.saved_at > now + _CLOCKS

    @property
    def good(self) -> bool:
        """Nothing speaks against loading it."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """What to load; `checkpoint`, `tag` and `path` are None if there is nothing."""

    checkpoint: Checkpoint | None
    problems: tuple[FileProblem, ...]
    """Why better candidates were passed over, and what interrupted saves left behind."""
    others: tuple[Checkpoint, ...] = ()
    """The other whole checkpoints, newest first."""
    named: bool = True
    """A tag was given, or there is a `latest`."""

    @property
    def tag(self) -> str | None:
        return None if self.checkpoint is None else self.checkpoint.tag

    @property
    def path(self) -> Path | None:
        """Its directory."""
        return None if self.checkpoint is None else self.checkpoint.path

    def explained(self) -> str:
        """Problems and alternatives for an error message."""
        told = "; ".join(map(str, self.problems)) or "no checkpoint is there"
        if not self.others:
            return f"{told}. There is no other whole checkpoint here."
        rest = ", ".join(checkpoint.tag for checkpoint in self.others[1:4])
        also = f" (also: {rest})" if rest else ""
        return f"{told}. The newest whole checkpoint here is {self.others[0].tag!r}{also}: give it as the tag."


def examine(path: str | os.PathLike[str], tag: str) -> Checkpoint:
    """Look at a directory; reads the manifest, or where there is none the ends of its files."""
    path = Path(path)
    try:
        manifest = manifests.read(path)
    except CheckpointError as error:
        problem = FileProblem(str(path / manifests.NAME), str(error))
        return Checkpoint(tag, path, None, (problem,), _modified(path))
    if manifest is not None:
        return Checkpoint(tag, path, manifest, tuple(manifests.sizes(path, manifest.files)), manifest.saved_at)
    files = sorted(path.glob("*.pt"))
    cut = [FileProblem(str(file), "truncated: it has no zip directory at its end") for file in files if _is_cut(file)]
    if not files and next(path.iterdir(), None) is None:
        cut = [FileProblem(str(path), "an empty directory")]
    return Checkpoint(tag, path, None, tuple(cut), _modified(path))


def _is_cut(path: Path) -> bool:
    try:
        with open(open_regular(path), "rb") as file:
            start = file.read(4)
    except OSError:
        return True
    return not start or (start == b"PK\x03\x04" and not is_whole(path))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def scan(save_dir: str | os.PathLike[str]) -> list[Checkpoint]:
    """Every checkpoint in a directory, newest first; foreign directories without any .pt file are none.

    Tags may have slashes: such a checkpoint is one of this directory if its manifest has that tag, and otherwise of a
    directory within. One that says it was saved in the future comes last: its time tells nothing.
    """
    examined = [examine(path, tag) for tag, path in _places(Path(save_dir)).items()]
    found = [each for each in examined if "/" not in each.tag or (each.manifest and each.manifest.tag == each.tag)]
    now = time.time()
    return sorted(found, key=lambda checkpoint: (not checkpoint.is_ahead(now), checkpoint.saved_at), reverse=True)


def _places(save_dir: Path) -> dict[str, Path]:
    """The directories that look like checkpoints, by tag."""
    places: dict[str, Path] = {}
    waiting, looked_at = deque([""]), 0
    while waiting and looked_at < _MOST:
        below = waiting.popleft()
        try:
            with os.scandir(save_dir / below) as listed:
                entries = list(itertools.islice((e for e in listed if e.name[0] != "." and e.is_dir()), _MOST))
        except FileNotFoundError:
            continue
        except OSError as error:
            if below:  # somebody else's folder
                continue
            raise explain(error, save_dir) from error
        looked_at += len(entries)
        for entry in entries:
            tag, path = f"{below}{entry.name}", Path(entry)
            if _is_checkpoint(path):
                places[tag] = path
            elif not entry.is_symlink() and tag.count("/") < _DEPTH - 1:
                waiting.append(f"{tag}/")
        for left in leftovers(save_dir / below):
            if left.kind == "replaced":  # between the two renames of a replacement this is where the checkpoint is
                places.setdefault(f"{below}{left.tag}", left.path)
    return {tag: path for tag, path in places.items() if flaw_of_name(tag) is None and _is_checkpoint(path)}


def _is_checkpoint(path: Path) -> bool:
    try:
        return (path / manifests.NAME).exists() or next(path.glob("*.pt"), None) is not None
    except OSError:
        return False


def read_latest(save_dir: str | os.PathLike[str], latest: str = LATEST) -> str | None:
    """The tag that `latest` names, None where there is no such file."""
    path = Path(save_dir) / latest
    try:
        return read_regular(path, _LONGEST).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain(error, path) from error


def find_loadable(save_dir: str | os.PathLike[str], tag: str | None = None, latest: str = LATEST) -> FoundCheckpoint:
    """The checkpoint to load. Without a tag, the one that `latest` names or, if it is damaged, the newest good one.

    A tag that is asked for and not good is not replaced by another: the result is empty then, and says why.
    """
    save_dir = Path(save_dir)
    wanted = read_latest(save_dir, latest) if tag is None else str(tag)
    checkpoints = scan(save_dir)
    problems = [
        FileProblem(str(left.path), str(left).partition(": ")[2])
        for left in leftovers(save_dir)
        if not any(left.path == known.path for known in checkpoints)
    ]
    good = [checkpoint for checkpoint in checkpoints if checkpoint.good]
    if wanted is None:
        why = FileProblem(str(save_dir / latest), "there is no such file, so no checkpoint is named")
        return FoundCheckpoint(None, (why, *problems), tuple(good), named=False)
    chosen = next((c for c in checkpoints if c.tag == wanted), None)
    if chosen is None and wanted and flaw_of_name(wanted) is None and (save_dir / wanted).is_dir():
        chosen = examine(save_dir / wanted, wanted)  # a tag with a slash, or files of a kind we do not know
    if chosen is not None and chosen.good:
        return FoundCheckpoint(chosen, tuple(problems), tuple(c for c in good if c is not chosen))
    if chosen is not None:
        bad = chosen.problems
    elif tag is None:
        bad = (FileProblem(str(save_dir / latest), f"names {wanted!r}, of which there is no checkpoint"),)
    else:
        bad = (FileProblem(str(save_dir / wanted), "no such checkpoint"),)
    newest = good[0] if good and tag is None else None
    return FoundCheckpoint(newest, (*bad, *problems), tuple(c for c in good if c is not newest))


def common(found: Sequence[Sequence[Sequence[str]]]) -> int | None:
    """Which candidate of the first node to load: the first that every node has from the same save.

    Each node lists its candidates, best first, as (tag, save).
    """
    shared = [{tuple(candidate) for candidate in node} for node in found]
    for place, candidate in enumerate(found[0] if found else ()):
        if all(tuple(candidate) in node for node in shared):
            return place
    return None


def expired(checkpoints: Sequence[Checkpoint], keep_last: int, spared: Sequence[str | None]) -> list[Checkpoint]:
    """Those to remove, oldest first; `checkpoints` are newest first.

    A checkpoint goes only if it has a manifest, so that we know it for ours, no `latest` names it, it is no link, and
    at least `keep_last` good ones are newer. Damaged ones, and ones that say they were saved in the future, do not
    count as kept: they never displace a good one.
    """
    good, now = 0, time.time()
    result = []
    for checkpoint in checkpoints:
        if checkpoint.is_ahead(now):
            continue
        known = checkpoint.manifest is not None and not checkpoint.path.is_symlink()
        if good >= keep_last and known and checkpoint.tag not in spared:
            result.append(checkpoint)
        good += checkpoint.good
    return result[::-1]


def retain(save_dir: str | os.PathLike[str], keep_last: int, token: str, latest: str = LATEST) -> list[Path]:
    """Remove the expired checkpoints of a directory; returns where they were."""
    names = {latest, LATEST, LATEST_UNIVERSAL}
    spared = [read_latest(save_dir, name) for name in names]
    gone = expired(scan(save_dir), max(keep_last, 1), spared)
    for number, checkpoint in enumerate(gone):
        if checkpoint.manifest is not None:
            remove(checkpoint.path, checkpoint.manifest, f"{token}{number}")
    return [checkpoint.path for checkpoint in gone]
