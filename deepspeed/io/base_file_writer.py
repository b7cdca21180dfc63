"""`BaseFileWriter`: what `torch.save` needs of a file, written once from front to end."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

__all__ = ["BaseFileWriter"]


class BaseFileWriter(ABC):
    """A file to write to; `close` finishes it, and errors of the disk surface there at the latest."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        self._file_path = os.fspath(file_path)

    def file_path(self) -> str:
        """Where the file lies."""
        return self._file_path

    @abstractmethod
    def write(self, buffer: Any) -> int:
        """Take all bytes of a buffer; their number. Nothing of it is used after the return."""

    @abstractmethod
    def fileno(self) -> int:
        """The descriptor of the file."""

    @abstractmethod
    def flush(self) -> None:
        """Hand everything to the operating system that can be."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left and close the file; harmless when repeated."""

    def __enter__(self) -> BaseFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
