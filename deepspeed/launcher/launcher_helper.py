"""Starts programs of this folder in an interpreter that never imports torch: run by path.

mpirun and srun run it once for each rank, with the options of lone_rank.py; the launcher runs it for the guard and the
relay, with the name of the module and the number of a descriptor. `python -m deepspeed.launcher.guard` would execute
`deepspeed/__init__.py`, which imports torch: seconds, and hundreds of megabytes, for a process that only waits. Here
empty modules stand for the packages, and only find their files.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(words: Sequence[str]) -> int:
    """Run what the words describe, and return its exit status."""
    if words[0].startswith("-"):
        status: int = _load("lone_rank").main(words)
    else:
        sys.excepthook = _die
        status = _load(words[0]).main(int(words[1]))
    return status


def _die(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """A bug in the guard must not look like the end of a rank: the launcher cleans up after a guard that was killed."""
    sys.__excepthook__(kind, error, trace)
    os.kill(os.getpid(), signal.SIGKILL)


def _load(name: str) -> Any:
    """A module of `deepspeed.launcher`, which imports none that need torch."""
    root = Path(__file__).resolve().parents[1]
    for package, folder in (("deepspeed", root), ("deepspeed.comm", root / "comm")):
        sys.modules[package] = hollow = types.ModuleType(package)
        hollow.__path__ = [str(folder)]
    return importlib.import_module(f"deepspeed.launcher.{name}")


if __name__ == "__main__":
    if not sys.flags.isolated:
        sys.path.pop(0)  # this folder, whose modules are not meant to be found by their short names
    # Not sys.exit: it would answer with a status of its own where stderr is closed, and wait for threads that write.
    os._exit(main(sys.argv[1:]))
