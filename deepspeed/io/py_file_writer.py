"""`PyFileWriter`: a file of Python's, to compare others with."""

from __future__ import annotations

import os
from typing import Any

from deepspeed.io.base_file_writer import BaseFileWriter

__all__ = ["PyFileWriter"]


class PyFileWriter(BaseFileWriter):
    """Writes through Python's buffer and the page cache."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._file = open(file_path, "wb")  # noqa: SIM115 - closed by close()

    def write(self, buffer: Any) -> int:
        return self._file.write(buffer)

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
