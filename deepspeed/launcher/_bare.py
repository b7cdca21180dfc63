"""Starts the guard in an interpreter that never imports torch: run by path, with the guard's end of the pipe.

`python -m deepspeed.launcher.guard` would execute `deepspeed/__init__.py`, which imports torch: seconds, and hundreds
of megabytes, for a process that only waits. Here an empty module stands for the package, and only finds its files.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import types
from pathlib import Path


def _die(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """A bug in the guard must not look like the end of a rank: the launcher cleans up after a guard that was killed."""
    sys.__excepthook__(kind, error, trace)
    os.kill(os.getpid(), signal.SIGKILL)


def _start() -> int:
    sys.excepthook = _die
    package = types.ModuleType("deepspeed")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["deepspeed"] = package
    status: int = importlib.import_module("deepspeed.launcher.guard").main(int(sys.argv[1]))
    return status


if __name__ == "__main__":
    # Not sys.exit: it would answer with a status of its own where stderr is closed, and wait for threads that write.
    os._exit(_start())
