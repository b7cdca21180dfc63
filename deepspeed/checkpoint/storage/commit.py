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
from deepspeed.checkpoint.storage.durable import PART, explain, sync_directory, write_text
from deepspeed.checkpoint.storage.manifest import Manifest
from deepspeed.errors import CheckpointError, printable
from deepspeed.log import logger
from deepspeed.trust import flaw_of_name, has_link, read_regular

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_HIDDEN = re.compile(r"\.(?P<tag>[^.].*)\.(?P<kind>saving|replaced|removing)-(?P<token>\w+)", re.DOTALL)
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD
_DAY = 24 * 3600.0
_POINTERS = (LATEST, LATEST_UNIVERSAL)


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
            if has_link(self.save_dir, os.path.dirname(self.tag)):
                raise CheckpointError(
                    f"{self.target}: a folder on the way from {self.save_dir} to it is a link, which leads out of it. "
                    "Save to the place that the link names, or use another tag."
                )
            for line in recover(self.target.parent):
                logger.warning("%s", line)
            self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
        if old is not None and old.is_symlink():
            old.unlink(missing_ok=True)
        elif old is not None:
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
        linked = self.target.is_symlink()  # then the link gives way, and what it names stays as it is
        if not linked and (not self.target.is_dir() or not any(self.target.iterdir())):
            os.rename(self.path, self.target)
            return None
        if not linked:
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
        return path.is_symlink() or read_regular(path, len(text) * 4) != text.encode()
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
    listed = {manifests.NAME, *(known.files if known else ())}
    for name in files_in(old):
        ours = name in listed or PART.fullmatch(os.path.basename(name)) is not None
        if known is None:
            ours |= name.endswith((".pt", ".safetensors"))
        if ours or os.path.lexists(new / name):
            continue
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        _link(old / name, new / name)


def files_in(folder: Path, below: str = "") -> Iterator[str]:
    """Every entry in a folder and the folders in it that is no folder; links are such, whatever they name."""
    with os.scandir(folder / below) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from files_in(folder, f"{below}{entry.name}/")
            else:
                yield f"{below}{entry.name}"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def leftovers(directory: str | os.PathLike[str]) -> Iterator[Leftover]:
    """The hidden directories of saves: interrupted ones, and those going on now."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        match, path = _HIDDEN.fullmatch(name), Path(directory) / name
        if match and flaw_of_name(match["tag"]) is None and path.is_dir() and not path.is_symlink():
            active = match["kind"] == "saving" and _is_locked(path)
            yield Leftover(path, match["tag"], match["kind"], active)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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
    """Clear up after crashes and tell what was done; for whoever is about to save here.

    What cannot be cleared up stays: somebody else's file or mode must not keep us from saving.
    """
    told = []
    for found in leftovers(directory):
        if found.active:
            continue
        target = found.path.with_name(found.tag)
        try:
            if found.kind == "replaced" and not os.path.lexists(target) and _is_of(found.path, found.tag):
                os.rename(found.path, target)
                sync_directory(directory)
                told.append(f"{target}: put back, a save that was to replace it was interrupted")
            else:
                shutil.rmtree(found.path)
                told.append(f"{found.path}: removed, left by an interrupted save or removal of tag {found.tag}")
        except OSError as error:
            told.append(f"{found.path}: left by an interrupted save; it stays, {error.strerror or error}")
    _drop_parts(directory)
    return [printable(line) for line in told]


def _is_of(path: Path, tag: str) -> bool:
    """Whether a directory is a checkpoint of a tag; one without a manifest, of which nobody knows, may be."""
    try:
        manifest = manifests.read(path)
    except CheckpointError:
        return False
    return tag not in _POINTERS and (manifest is None or manifest.tag.rpartition("/")[2] == tag)


def _drop_parts(directory: str | os.PathLike[str]) -> None:
    """Remove files that a process was writing when it ended."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if PART.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) and not _is_locked(Path(entry)):
                os.unlink(entry)


def remove(path: str | os.PathLike[str], manifest: Manifest, token: str) -> None:
    """Remove the files that a manifest lists and the folders that are empty then: nothing else, whoever put it there.

    A crash leaves the checkpoint whole, or recognisably on its way out.
    """
    path = Path(path)
    listed = [*manifest.files, manifests.NAME]  # the manifest last: what is left without it would look whole
    try:
        ours_alone = not set(files_in(path)).difference(listed)
        away = path.with_name(f".{path.name}.removing-{token}") if ours_alone else path
        if ours_alone:
            os.rename(path, away)
            sync_directory(path.parent)
        for name in listed:
            if not has_link(away, os.path.dirname(name)) and not (away / name).is_dir():
                (away / name).unlink(missing_ok=True)
        folders = {parent for name in listed for parent in Path(name).parents}
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            with contextlib.suppress(OSError):  # somebody else's files are in it
                os.rmdir(away / folder)
    except OSError as error:
        raise explain(error, path) from error
