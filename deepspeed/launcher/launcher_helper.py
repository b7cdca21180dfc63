"""Run by path by mpirun or srun, once for each rank: sets what DeepSpeed's launcher would set, and guards the rank.

Torch is not imported here: see _bare.py.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run the rank that the words describe, and return its exit status."""
    bare = runpy.run_path(str(Path(__file__).with_name("_bare.py")))
    status: int = bare["load"]("lone_rank").main(words)
    return status


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not meant to be found by their short names
    os._exit(main(sys.argv[1:]))
