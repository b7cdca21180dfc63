"""Starts the guard, or another program that only waits, in an interpreter that never imports torch: run by path.

`python -m deepspeed.launcher.guard` would execute `deepspeed/__init__.py`, which imports torch: seconds, and hundreds
of megabytes, for a process that only waits. Here empty modules stand for the packages, and only find their files.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any


def _die(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """A bug in the guard must not look like the end of a rank: the launcher cleans up after a guard that was killed."""
    sys.__excepthook__(kind, error, trace)
    os.kill(os.getpid(), signal.SIGKILL)


def load(name: str) -> Any:
    """A module of `deepspeed.launcher`, which imports none that need torch."""
    root = Path(__file__).resolve().parents[1]
    for package, folder in (("deepspeed", root), ("deepspeed.comm", root / "comm")):
        sys.modules[package] = hollow = types.ModuleType(package)
        hollow.__path__ = [str(folder)]
    return importlib.import_module(f"deepspeed.launcher.{name}")


if __name__ == "__main__":
    sys.excepthook = _die
    # Not sys.exit: it would answer with a status of its own where stderr is closed, and wait for threads that write.
    os._exit(load(sys.argv[1]).main(int(sys.argv[2])))
