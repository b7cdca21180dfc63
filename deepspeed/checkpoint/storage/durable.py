"""Durable files: written under another name, forced to the disk, then renamed; what their errors mean.

`torch.save` computes a checksum of every tensor in the thread that writes, which halves its speed and which
`torch.load` never looks at. It is switched off while we write: the manifest has sums of its own (see [Note: blocks]).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.checkpoint.storage.block_writer import FileFacts, Stream, WriterOptions
from deepspeed.errors import CheckpointError
from deepspeed.log import logger
from deepspeed.trust import open_regular

PART = re.compile(r"\..+\.part(-[0-9a-f]{16})?")
"""The names of files that are being written, or were when a process ended."""
_LONGEST = 200  # of a name to which something is added


class _ZipSums:
    """Counts who wants torch.save without its own checksums, since that is one switch for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = torch.serialization.get_crc32_options()
                torch.serialization.set_crc32_options(False)
            self._users += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                torch.serialization.set_crc32_options(self._before)


_NO_ZIP_SUMS = _ZipSums()


class Sink(Protocol):
    """What torch.save can write to."""

    def write(self, data: Any) -> int:
        """Take all of a buffer."""

    def tell(self) -> int:
        """Bytes taken so far."""


def dump(obj: Any, stream: Sink, zipped: bool = True) -> None:
    """`torch.save` into a stream; `zipped=False` is torch's older format (`checkpoint_serialization`)."""
    with _NO_ZIP_SUMS:
        torch.save(obj, stream, _use_new_zipfile_serialization=zipped)  # type: ignore[arg-type]


def write_tensorfile(
    path: str | os.PathLike[str], obj: Any, options: WriterOptions | None = None, *, zipped: bool = True
) -> FileFacts:
    """`torch.save`, durable: after it returns, `path` is the whole new file; before, it is what it was."""
    return write_file(path, lambda stream: dump(obj, stream, zipped), options, needed=lambda: payload(obj))


def write_text(path: str | os.PathLike[str], text: str, *, executable: bool = False) -> FileFacts:
    """A text file in UTF-8, durable as of `write_tensorfile`; the directory is forced to the disk too."""
    data = text.encode()
    facts = write_file(
        path, lambda stream: stream.write(data), needed=lambda: len(data), mode=0o777 if executable else 0o666
    )
    sync_directory(Path(path).parent)
    return facts


def write_file(
    path: str | os.PathLike[str],
    produce: Callable[[Stream], object],
    options: WriterOptions | None = None,
    *,
    needed: Callable[[], int] | None = None,
    mode: int = 0o666,
) -> FileFacts:
    """Let `produce` fill a file under another name, force it to the disk and rename it to `path`.

    The rename is durable once the directory is (`sync_directory`), which pays to do once for several files.
    """
    path = Path(path)
    options = options or WriterOptions()
    # A name that nobody can foresee, and a file that was not there: what somebody laid in wait here is not followed.
    part = path.with_name(f".{path.name[:_LONGEST]}.part-{secrets.token_hex(8)}")
    began = time.perf_counter()
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            with contextlib.suppress(OSError):  # tells others that it is not left over
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stream = Stream(descriptor, options)
            try:
                produce(stream)
                facts = stream.finish()
            finally:
                stream.close()
            if options.discard:
                part.unlink()
            else:
                os.rename(part, path)
        finally:
            os.close(descriptor)
    except OSError as error:
        told = explain(error, path, needed() if needed else None)
        _drop(part)
        raise told from error
    except BaseException:
        _drop(part)
        raise
    if options.statistics:
        seconds = time.perf_counter() - began
        logger.info("%s: %s in %.2f s, %s/s", path, gibibytes(facts.size), seconds, gibibytes(facts.size / seconds))
    return facts


def _drop(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink()


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Force the names in a directory to the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems whose directories are always durable
            raise explain(error, path) from error


def explain(error: OSError, path: str | os.PathLike[str], needed: int | None = None) -> CheckpointError:
    """What an error of the operating system means for a checkpoint, and what to do about it."""
    place = Path(path)
    what = f"{place}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        wants = "" if needed is None else f" This file needs {gibibytes(needed)}."
        return CheckpointError(
            f"{what}.{wants} Free on its file system: {_free(place)}. "
            "Free space or quota, save to another directory, or keep fewer checkpoints."
        )
    if error.errno == errno.EFBIG:
        return CheckpointError(
            f"{what}. The file system or a limit of this process (ulimit -f) forbids files of this size. "
            "Raise the limit, or save to another file system."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return CheckpointError(
            f"{what} for user {os.geteuid()}. Change the owner or mode of {_existing(place)}, or save elsewhere."
        )
    if error.errno == errno.EROFS:
        return CheckpointError(f"{what}. {_existing(place)} is mounted read-only: remount it, or save elsewhere.")
    if error.errno is None:  # of deepspeed.trust
        return CheckpointError(f"{what}. Expected a regular file of a checkpoint; do not use this one.")
    if error.errno == errno.ENOENT:
        return CheckpointError(f"{what}. {_existing(place)} is what exists of this path; was the rest removed?")
    return CheckpointError(f"{what}. The operating system refused (errno {error.errno}); check this path and its disk.")


def _existing(path: Path) -> Path:
    """The path, or the first of its parents that exists."""
    return next((place for place in (path, *path.absolute().parents) if os.path.lexists(place)), path)


def _free(path: Path) -> str:
    try:
        return gibibytes(shutil.disk_usage(_existing(path)).free)
    except OSError:
        return "unknown"


def gibibytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def is_whole(path: str | os.PathLike[str]) -> bool:
    """True if a zip file has its directory, which is written last; reads a few kilobytes."""
    try:
        with open(open_regular(path), "rb") as file:
            return zipfile.is_zipfile(file)
    except OSError:
        return False


# ---- tensors as memory


def tensors_in(obj: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(obj, Tensor):
        yield obj
    elif isinstance(obj, Mapping):
        for value in obj.values():
            yield from tensors_in(value)
    elif isinstance(obj, (list, tuple, set, frozenset)):
        for value in obj:
            yield from tensors_in(value)


def payload(obj: Any) -> int:
    """About how many bytes an object takes in a file: those of its tensors' memory, shared memory once."""
    if isinstance(obj, bytes):
        return len(obj)
    storages = (tensor.untyped_storage() for tensor in tensors_in(obj) if tensor.layout is torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
