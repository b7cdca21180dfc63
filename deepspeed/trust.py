"""Names, paths and files that came from elsewhere: what they must be before anything is done with them.

A name out of a file, a config or a host list becomes a path only through `inside`; a file whose content is not ours is
opened only through `open_regular` or `read_regular`, which neither wait for a pipe nor read a device without end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from deepspeed.errors import CheckpointError, DeepSpeedError

_LONGEST = 4096  # what systems allow for a path
_LONGEST_PART = 255


def flaw_of_name(name: object, *, hidden: bool = True) -> str | None:
    """What keeps a name from being a path that stays inside any folder, as words for a message; None if it does.

    `hidden`: whether a part may begin with a dot.
    """
    if not isinstance(name, str):
        return f"is {type(name).__name__}, not text"
    if not name or not name.strip("./"):
        return "names no file" if ".." not in name.split("/") else "has '..' in it"
    if "\0" in name:
        return "has a NUL character in it"
    if len(name) > _LONGEST or any(len(part.encode(errors="replace")) > _LONGEST_PART for part in name.split("/")):
        return f"is {len(name)} characters long, more than a path can be"
    if name.startswith("/"):
        return "is an absolute path"
    parts = name.split("/")
    if ".." in parts:
        return "has '..' in it"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return "has characters that no file name can have"
    if not hidden and any(part.startswith(".") for part in parts):
        return "has a part that begins with a dot"
    return None


def inside(
    folder: str | os.PathLike[str], name: object, what: str, *, error: type[DeepSpeedError] = CheckpointError
) -> Path:
    """`folder / name`, where `name` cannot lead out of the folder; else an `error` that says what `what` is."""
    flaw = flaw_of_name(name)
    if flaw is not None:
        raise error(f"{what} {name!r:.200} {flaw}; expected a relative path that stays inside {os.fspath(folder)}")
    return Path(folder) / str(name)


def has_link(folder: str | os.PathLike[str], name: str) -> bool:
    """Whether a part of a relative path below `folder`, the last one included, is a symbolic link."""
    place = Path(folder)
    for part in Path(name).parts:
        place /= part
        if place.is_symlink():
            return True
    return False


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor to read a regular file; an OSError for a pipe, a device, a socket or a folder, without waiting."""
    # Without O_NONBLOCK, opening a pipe would wait for somebody who writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "not a regular file", os.fspath(path))
    return descriptor


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes; an OSError for anything else."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(size, limit) + 1)  # not more: so much memory is taken, whether there is as much or not
    if len(data) > limit:
        raise OSError(None, f"larger than the {limit} bytes that such a file may have", os.fspath(path))
    return data
