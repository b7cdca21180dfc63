"""Where compiled libraries are kept, and how one comes there: whole or not at all, whoever else builds or dies.

[Note: no lock can hang] A library is compiled under a name of its own and renamed. Processes that start together let
one of them compile: they wait for a lock that the system takes from a process that ends, however it ends, and not for
longer than a build takes. Whoever has waited in vain compiles too; both results are the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deepspeed.errors import OpUnavailable

__all__ = ["folder", "keep"]

_PATIENCE_S = 60.0
_POLL_S = 0.05
_STALE_S = 3600.0
_UNFINISHED = ".unfinished"


def folder() -> Path:
    """The cache, made if need be: below `$TORCH_EXTENSIONS_DIR`, `$XDG_CACHE_HOME` or ~/.cache, private to the user."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(given, "deepspeed_native") if given else Path(cache, "deepspeed", "native")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.stat()
    # What lies there is executed: nobody else may have put it there.
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OpUnavailable(
            f"{place} holds compiled code, but belongs to user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}; it must be yours and writable by you alone. Remove it, or set "
            "TORCH_EXTENSIONS_DIR to another folder"
        )
    return place


def keep(place: Path, make: Callable[[Path], None]) -> Path:
    """`place`, where `make` has put a file; it is called with another path, unless the file is there already."""
    if place.exists():
        return place
    with _turn(place.with_suffix(".lock")):
        if place.exists():
            return place
        _tidy(place.parent)
        handle, name = tempfile.mkstemp(prefix=place.stem, suffix=_UNFINISHED, dir=place.parent)
        os.close(handle)
        unfinished = Path(name)
        try:
            make(unfinished)
            with unfinished.open("rb+") as made:
                os.fsync(made.fileno())
            unfinished.replace(place)
        finally:
            unfinished.unlink(missing_ok=True)
    return place


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock, or go on without it after a while."""
    with path.open("a") as file:
        patience = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > patience:
                    break
                time.sleep(_POLL_S)
            except OSError:
                break  # a file system without locks
        yield


def _tidy(place: Path) -> None:
    """Remove what builds that were killed long ago have left."""
    for left in place.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink()
