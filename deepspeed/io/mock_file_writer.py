"""`MockFileWriter`: takes bytes and writes none, to measure everything but the disk."""

from __future__ import annotations

import os
from typing import Any

from deepspeed.io.base_file_writer import BaseFileWriter

__all__ = ["MockFileWriter"]


class MockFileWriter(BaseFileWriter):
    """No file is made; `size` counts what would be in it."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self.size = 0

    def write(self, buffer: Any) -> int:
        count = memoryview(buffer).nbytes
        self.size += count
        return count

    def fileno(self) -> int:
        """There is none: -1."""
        return -1

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
