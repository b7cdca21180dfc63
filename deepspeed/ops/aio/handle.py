"""`aio_handle`: the file engine with the calls that scripts know."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deepspeed.errors import FileError
from deepspeed.ops.aio.engine import FileEngine
from deepspeed.ops.aio.locked import is_locked, locked_tensor, unlock
from deepspeed.ops.aio.open_file import Place, describe
from deepspeed.ops.host_memory import bytes_of

_PIECE = 2**24


class LockedTensors:
    """Tensors in page-locked memory."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A zeroed tensor of `num_elem` elements of the example's dtype, in memory that begins with a page."""
        return locked_tensor(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Unlock a tensor of `new_cpu_locked_tensor`; False if it is none. Its memory goes with its last view."""
        return unlock(locked_tensor.data_ptr())

    def is_pinned(self, buffer: Tensor) -> bool:
        """Whether the memory is page-locked, by torch or by `new_cpu_locked_tensor`."""
        return is_locked(buffer)


class aio_handle(LockedTensors):
    """Reads and writes tensors; begun with `async_*`, finished by `wait`. Buffers are left alone in between.

    A tensor of a device goes through memory of the host. What fails raises a FileError, at `wait` if it was only begun.
    """

    def __init__(
        self,
        block_size: int = 2**20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._engine = FileEngine(
            block_size=block_size,
            queue_depth=queue_depth,
            threads=intra_op_parallelism,
            single_submit=single_submit,
            overlap_events=overlap_events,
        )
        self._pending: list[FileRequest] = []

    def get_block_size(self) -> int:
        """Bytes of a block."""
        return self._engine.flow.block_size

    def get_queue_depth(self) -> int:
        """Blocks in flight, per thread."""
        return self._engine.flow.queue_depth

    def get_single_submit(self) -> bool:
        """Whether every block is a system call of its own."""
        return self._engine.flow.single_submit

    def get_overlap_events(self) -> bool:
        """Whether more is submitted while earlier blocks are on their way."""
        return self._engine.flow.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Threads that share one request."""
        return self._engine.flow.threads

    def get_alignment(self) -> int:
        """Sizes and offsets that are multiples of this go past the page cache; others work too."""
        return self._engine.alignment

    def read(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Fill the buffer now; 0 when it is filled. `validate` reads again in another way and compares."""
        self._begin(buffer, filename, file_offset, write=False, validate=validate).finish()
        return 0

    def write(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Write the buffer now; 0 when it is written. `validate` reads it back and compares."""
        self._begin(buffer, filename, file_offset, write=True, validate=validate).finish()
        return 0

    def pread(self, buffer: Tensor, filename: str, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """`async_op`: begin to fill the buffer and return 0; else fill it and return 1."""
        return self._end(self._begin(buffer, filename, file_offset, write=False, validate=validate), async_op)

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """`async_op`: begin to write the buffer and return 0; else write it and return 1."""
        return self._end(self._begin(buffer, filename, file_offset, write=True, validate=validate), async_op)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill the buffer; the number of requests done, 1."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write the buffer; the number of requests done, 1."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Begin to fill the buffer from a path or an open descriptor; 0."""
        return self._end(self._begin(buffer, filename, file_offset, write=False), True)

    def async_pwrite(self, buffer: Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Begin to write the buffer to a path or an open descriptor; 0."""
        return self._end(self._begin(buffer, filename, file_offset, write=True), True)

    def wait(self) -> int:
        """Finish everything that was begun; how many requests that were. The first that failed raises its error."""
        pending, self._pending = self._pending, []
        failed: OSError | None = None
        for request in pending:
            try:
                request.finish()
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return len(pending)

    def _end(self, request: FileRequest, async_op: bool) -> int:
        if async_op:
            self._pending.append(request)
            return 0
        request.finish()
        return 1

    def _begin(self, buffer: Tensor, place: Place, offset: int, *, write: bool, validate: bool = False) -> FileRequest:
        host = buffer
        if buffer.device.type != "cpu":
            host = locked_tensor(buffer.numel(), buffer.dtype).view(buffer.shape)
            if write:
                host.copy_(buffer)
        ticket = (self._engine.write if write else self._engine.read)(place, host, offset)
        return FileRequest(ticket.wait, buffer, host, place, offset, write, validate)


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A read or write that was begun, of `buffer` by way of `host`, which may be the same."""

    wait: Callable[[], object]
    """Returns when the bytes are moved, or raises."""
    buffer: Tensor
    host: Tensor
    place: Place
    offset: int
    write: bool
    validate: bool

    def finish(self) -> None:
        """Return when it is done; raises what went wrong."""
        self.wait()
        if self.validate:
            self._compare()
        if self.host is not self.buffer and not self.write:
            self.buffer.copy_(self.host)

    def _compare(self) -> None:
        """A FileError if a plain read of the file finds other bytes."""
        view = bytes_of(self.host.cpu())
        with open(self.place, "rb") as file:
            file.seek(self.offset)
            for start in range(0, len(view), _PIECE):
                if file.read(min(_PIECE, len(view) - start)) != view[start : start + _PIECE]:
                    what = f"{'write' if self.write else 'read'} of {len(view)} bytes at offset {self.offset}"
                    stop = self.offset + min(start + _PIECE, len(view))
                    found = f"a plain read finds other bytes between {self.offset + start} and {stop}"
                    raise FileError(errno.EIO, f"{what}: {found}", describe(self.place))


class pin_handle(LockedTensors):
    """Tensors in page-locked memory, without files."""

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """As `free_cpu_locked_tensor`, by where the memory begins."""
        return unlock(address)


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill the buffer from the beginning of a file; 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write the buffer to the beginning of a file; 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy a tensor of the host to another one of as many bytes; 0."""
    dest.view(-1).copy_(src.view(-1))
    return 0
