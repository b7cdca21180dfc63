"""How a checkpoint comes into being: files in a staging directory, a manifest, one rename, then `latest`.

[Note: commit] A save writes into `.TAG.saving-TOKEN` beside the place where it will stand. When all files and the
manifest are on the disk, the directory takes its place in one step; a checkpoint of that name which stood there
changes places with it (where the system can only rename, it steps aside as `.TAG.replaced-TOKEN` first, from where a
reader still finds it). Only then is `latest` rewritten, and the old one removed. So at every instant there is a whole
checkpoint, and a directory without a leading dot is never half-written by us. A running save holds a lock on its
staging directory; what is not locked was left behind by a crash and is removed by the next save, never by a load.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepspeed.checkpoint.storage import manifest as manifests
from deepspeed.checkpoint.storage.durable import explain, sync_directory, write_text
from deepspeed.checkpoint.storage.manifest import Manifest
from deepspeed.errors import CheckpointError
from deepspeed.log import logger

__all__ = ["LATEST", "Leftover", "Staging", "leftovers", "recover", "remove"]

LATEST = "latest"
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|replaced|removing)-(?P<token>\w+)")
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD
_DAY = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory that an interrupted save or removal left behind, or that one is using now."""

    path: Path
    tag: str
    kind: str
    """saving, replaced or removing."""
    active: bool
    """A process holds its lock."""

    def __str__(self) -> str:
        if self.active:
            return f"{self.path}: tag {self.tag} is being saved at this moment"
        what = {
            "saving": "an interrupted save of",
            "replaced": "the older version of",
            "removing": "an interrupted removal of",
        }[self.kind]
        return f"{self.path}: {what} tag {self.tag}; it is ignored and removed by the next save"


class Staging:
    """A checkpoint in the making; the leader of a directory opens, seals and publishes it, all ranks write into it."""

    def __init__(self, save_dir: str | os.PathLike[str], tag: str, token: str) -> None:
        self.save_dir = Path(save_dir)
        self.tag = tag
        self.target = self.save_dir / tag
        self.path = self.target.with_name(f".{self.target.name}.saving-{token}")
        self._aside = self.target.with_name(f".{self.target.name}.replaced-{token}")
        self._lock: int | None = None

    def open(self) -> None:
        """Make the directory and hold its lock, after clearing up what crashes left."""
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            for line in recover(self.target.parent):
                logger.warning("%s", line)
            self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise explain(error, self.path) from error
        with contextlib.suppress(OSError):  # without locks, age tells what is left over
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def seal(self, manifest: Manifest) -> None:
        """Make what all ranks wrote durable, then the manifest that vouches for it."""
        missing = manifests.sizes(self.path, manifest.files)
        if missing:
            raise CheckpointError(
                f"{missing[0]} (and {len(missing) - 1} more). A rank wrote it, but this one does not see it so. Where "
                "nodes do not share the directory, set checkpoint.use_node_local_storage."
            )
        for directory in sorted({(self.path / name).parent for name in manifest.files} | {self.path}):
            sync_directory(directory)
        manifests.write(self.path, manifest)

    def publish(self, latest: str | None = LATEST, scripts: Mapping[str, str] | None = None) -> None:
        """Take the place of the checkpoint, make it durable, then let `latest` name it."""
        try:
            old = self._take_place()
            try:
                sync_directory(self.target.parent)
                for name, text in (scripts or {}).items():
                    if _differs(self.save_dir / name, text):
                        write_text(self.save_dir / name, text, executable=True)
                if latest is not None:
                    write_text(self.save_dir / latest, self.tag)
            except BaseException:
                self._step_back(old)
                raise
        except OSError as error:
            raise explain(error, self.target) from error
        finally:
            self._unlock()
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the staging directory: the save has failed."""
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_place(self) -> Path | None:
        """Rename into place; where an older checkpoint went, if there was one."""
        if not self.target.is_dir() or not any(self.target.iterdir()):
            os.rename(self.path, self.target)
            return None
        _keep_others(self.target, self.path)
        if _exchange(self.path, self.target):
            return self.path
        os.rename(self.target, self._aside)
        try:
            os.rename(self.path, self.target)
        except OSError:
            os.rename(self._aside, self.target)
            raise
        return self._aside

    def _step_back(self, old: Path | None) -> None:
        """Undo `_take_place`: the save fails, and what was there before is to stay."""
        if old == self.path and _exchange(self.path, self.target):
            return
        os.rename(self.target, self.path)
        if old is not None:
            os.rename(old, self.target)


def _differs(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() != text.encode()
    except OSError:
        return True


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories change places in one step; False where system or file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _keep_others(old: Path, new: Path) -> None:
    """Link what lies in the old directory and is no part of a checkpoint into the new one."""
    try:
        known = manifests.read(old)
    except CheckpointError:
        known = None
    mine = {manifests.NAME, *(Path(name).parts[0] for name in (known.files if known else ()))}
    for entry in old.iterdir():
        ours = entry.name in mine or entry.name.startswith(".")
        if known is None:
            ours |= entry.suffix in (".pt", ".safetensors")
        if ours or (new / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, new / entry.name)


def _link(source: str | Path, target: str | Path) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
    return str(target)


def leftovers(directory: str | os.PathLike[str]) -> Iterator[Leftover]:
    """The hidden directories of saves: interrupted ones, and those going on now."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        match = _HIDDEN.fullmatch(name)
        if match and (Path(directory) / name).is_dir():
            path = Path(directory) / name
            active = match["kind"] == "saving" and _is_locked(path)
            yield Leftover(path, match["tag"], match["kind"], active)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return time.time() - os.fstat(descriptor).st_mtime < _DAY
    finally:
        os.close(descriptor)


def recover(directory: str | os.PathLike[str]) -> list[str]:
    """Clear up after crashes and tell what was done; for whoever is about to save here."""
    told = []
    for found in leftovers(directory):
        if found.active:
            continue
        target = found.path.with_name(found.tag)
        if found.kind == "replaced" and not target.exists():
            os.rename(found.path, target)
            sync_directory(directory)
            told.append(f"{target}: put back, a save that was to replace it was interrupted")
        else:
            shutil.rmtree(found.path, ignore_errors=True)
            told.append(f"{found.path}: removed, left by an interrupted save or removal of tag {found.tag}")
    return told


def remove(path: str | os.PathLike[str], token: str) -> None:
    """Remove a checkpoint such that a crash leaves it whole or recognisably on its way out."""
    path = Path(path)
    away = path.with_name(f".{path.name}.removing-{token}")
    try:
        os.rename(path, away)
        sync_directory(path.parent)
        shutil.rmtree(away)
    except OSError as error:
        raise explain(error, path) from error
