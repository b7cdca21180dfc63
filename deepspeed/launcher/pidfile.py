"""The file of `--save_pid`: the launcher's pid, where only its user can read or replace it, gone when it ends."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed.launcher.errors import LaunchError

__all__ = ["pid_file", "pid_folder"]


def pid_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of pid files: below XDG_RUNTIME_DIR, else below the user's cache folder."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "deepspeed"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed"


@contextmanager
def pid_file(name: int, folder: Path | None = None) -> Iterator[Path]:
    """`<name>.deepspeed` with this process's pid, while the context is open."""
    folder = folder or pid_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise LaunchError(
            f"--save_pid: {folder} is a link, belongs to another user or is writable by others; "
            "make it a folder of your own with mode 700, or set XDG_RUNTIME_DIR to one"
        )
    path = folder / f"{name}.deepspeed"
    # The name holds the pid of a live process of ours, so whatever is there was left by a dead one with that pid.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
