"""Files for `torch.save`: written by an `aio_handle`, by Python, or not at all."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import FileError, UsageError
from deepspeed.ops.aio.handle import aio_handle
from deepspeed.ops.native import bytes_of, copy_bytes

__all__ = ["FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]


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

    def fileno(self) -> int:
        """The descriptor of the file; -1 where bytes may not go straight to one."""
        return -1

    def flush(self) -> None:  # noqa: B027 - a writer may have nothing to do
        """Hand everything to the operating system that can be."""

    def close(self) -> None:  # noqa: B027 - the same
        """Write what is left and close the file; harmless when repeated."""

    def __enter__(self) -> BaseFileWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


@dataclass
class FastFileWriterConfig:
    """How a file is written. Handle and memory are the writer's alone until it is closed."""

    dnvme_handle: aio_handle
    pinned_tensor: Tensor
    """Where bytes are gathered; best from the handle's `new_cpu_locked_tensor`."""
    double_buffer: bool = True
    """Whether one half of the memory is filled while the other one is written."""
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0

    def __post_init__(self) -> None:
        if self.num_parallel_writers != 1 or self.writer_rank != 0:
            raise UsageError(
                f"writer {self.writer_rank} of {self.num_parallel_writers} was asked for; a file has one writer, "
                f"number 0. Several ranks write faster with a file each"
            )


class FastFileWriter(BaseFileWriter):
    """A file that is written from front to end while more of it is produced.

    `torch.save` runs C++ code around `write`, through which an exception does not come whole. So the first error is
    kept, what follows is dropped, and `close` raises it. Before `close` there is nothing to flush: only whole pages go
    past the page cache.
    """

    def __init__(self, file_path: str | os.PathLike[str], config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        self._handle = config.dnvme_handle
        self._halves = _halves(config)
        self._descriptor: int | None = _create(self._file_path)
        self._turn = 0
        self._filled = 0  # bytes in the half that is being filled
        self._place = 0  # where it goes in the file
        self._error: FileError | None = None

    def write(self, buffer: Any) -> int:
        if self._descriptor is None:
            raise UsageError(f"{self._file_path} is closed")
        source = memoryview(buffer).cast("B")
        start = 0
        while start < len(source) and self._error is None:
            half = self._halves[self._turn]
            count = min(len(source) - start, len(half) - self._filled)
            copy_bytes(bytes_of(half)[self._filled : self._filled + count], source[start : start + count])
            start += count
            self._filled += count
            if self._filled == len(half):
                self._send()
        return len(source)

    def close(self) -> None:
        if self._descriptor is None:
            return
        descriptor = self._descriptor
        try:
            if self._filled and self._error is None:
                self._send()
            self._settle()
        finally:
            self._descriptor = None
            os.close(descriptor)
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        """Hand over what is gathered, after the other half is written, and go on with that one."""
        assert self._descriptor is not None, "only while the file is open"
        self._settle()
        self._handle.async_pwrite(self._halves[self._turn][: self._filled], self._descriptor, self._place)
        self._turn = (self._turn + 1) % len(self._halves)
        self._place += self._filled
        self._filled = 0
        if len(self._halves) == 1:
            self._settle()

    def _settle(self) -> None:
        try:
            self._handle.wait()
        except FileError as error:  # which names the descriptor
            what = f"{error.strerror} (while {self._file_path} was written)"
            self._error = self._error or FileError(error.errno or 0, what, self._file_path)


def _halves(config: FastFileWriterConfig) -> list[Tensor]:
    """The memory in one or two parts of whole pages."""
    memory = config.pinned_tensor.view(-1).view(torch.uint8)
    count = 2 if config.double_buffer else 1
    page = config.dnvme_handle.get_alignment()
    size = len(memory) // count // page * page
    if size == 0:
        raise UsageError(
            f"pinned_tensor has {len(memory)} bytes; expected at least {count * page}: {count} times the handle's "
            f"alignment"
        )
    return [memory[n * size : (n + 1) * size] for n in range(count)]


def _create(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)  # a file system without O_DIRECT


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


class MockFileWriter(BaseFileWriter):
    """No file is made; `size` counts what would be in it."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self.size = 0

    def write(self, buffer: Any) -> int:
        count = memoryview(buffer).nbytes
        self.size += count
        return count
