"""`aio_handle`: the file engine with the calls that scripts know."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import FileError
from deepspeed.ops.aio.engine import FileEngine
from deepspeed.ops.aio.open_file import Place, describe, is_locked, locked_tensor, unlock
from deepspeed.ops.native import bytes_of

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
        with open(_path_of(self.place), "rb") as file:
            file.seek(self.offset)
            for start in range(0, len(view), _PIECE):
                if file.read(min(_PIECE, len(view) - start)) != view[start : start + _PIECE]:
                    what = f"{'write' if self.write else 'read'} of {len(view)} bytes at offset {self.offset}"
                    stop = self.offset + min(start + _PIECE, len(view))
                    found = f"a plain read finds other bytes between {self.offset + start} and {stop}"
                    raise FileError(errno.EIO, f"{what}: {found}", describe(self.place))


def _path_of(place: Place) -> str:
    """Where a file can be opened once more: a descriptor of somebody else's is neither moved nor closed."""
    return f"/proc/self/fd/{place}" if isinstance(place, int) else os.fspath(place)


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


class gds_handle(aio_handle):
    """As `aio_handle`, but tensors of a CUDA device go straight to and from the disk, by torch's cuFile."""

    def __init__(
        self,
        block_size: int = 2**20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._threads = ThreadPoolExecutor(intra_op_parallelism, "deepspeed-gds")
        weakref.finalize(self, self._threads.shutdown)
        self._registered: set[int] = set()

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of the current device, of the example's dtype, registered with the driver."""
        made = torch.empty(num_elem, dtype=example_tensor.dtype, device="cuda")
        self.pin_device_tensor(made)
        return made

    def free_pinned_device_tensor(self, device_tensor: Tensor) -> bool:
        """Undo the registration; False if there is none. The memory goes with the tensor."""
        return self.unpin_device_tensor(device_tensor)

    def pin_device_tensor(self, device_tensor: Tensor) -> bool:
        """Register the tensor's storage with the driver, which saves a copy; False if it already is."""
        if device_tensor.data_ptr() in self._registered:
            return False
        torch.cuda.gds.gds_register_buffer(_storage(device_tensor))
        self._registered.add(device_tensor.data_ptr())
        return True

    def unpin_device_tensor(self, device_tensor: Tensor) -> bool:
        """Undo `pin_device_tensor`; False if there is nothing to undo."""
        if device_tensor.data_ptr() not in self._registered:
            return False
        torch.cuda.gds.gds_deregister_buffer(_storage(device_tensor))
        self._registered.discard(device_tensor.data_ptr())
        return True

    def _begin(self, buffer: Tensor, place: Place, offset: int, *, write: bool, validate: bool = False) -> FileRequest:
        if buffer.device.type != "cuda":
            return super()._begin(buffer, place, offset, write=write, validate=validate)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(buffer.device))
        moved = self._threads.submit(_move, buffer, place, offset, write, ready)
        return FileRequest(moved.result, buffer, buffer, place, offset, write, validate)


def _storage(tensor: Tensor) -> Any:
    """What torch's cuFile calls take; their annotations name a class of old."""
    return tensor.untyped_storage()


def _move(buffer: Tensor, place: Place, offset: int, write: bool, ready: torch.cuda.Event) -> None:
    """Move all bytes of a tensor; torch moves whole storages, so that a part of one is copied on the device."""
    ready.synchronize()
    alone = buffer.untyped_storage().nbytes() == buffer.nbytes
    whole = buffer if alone else buffer.clone()
    path = _path_of(place)
    what = f"{'write' if write else 'read'} of {buffer.nbytes} bytes at offset {offset}"
    try:
        if write and not isinstance(place, int):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        size = os.stat(path).st_size
        if not write and size < offset + buffer.nbytes:
            raise OSError(errno.ENODATA, f"the file has {size} bytes")
        with torch.cuda.device(buffer.device):
            file = torch.cuda.gds.GdsFile(path, os.O_RDWR if write else os.O_RDONLY)
            (file.save_storage if write else file.load_storage)(_storage(whole), offset)
            if not write and not alone:
                buffer.copy_(whole)
                torch.cuda.current_stream().synchronize()
    except OSError as error:
        raise FileError(error.errno or 0, f"{what}: {error.strerror}", describe(place)) from error
    except RuntimeError as error:
        raise FileError(errno.EIO, f"{what}: {error}", describe(place)) from error
