"""Op `gds`."""

from __future__ import annotations

import errno
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import FileError
from deepspeed.ops.aio.handle import FileRequest, aio_handle
from deepspeed.ops.aio.open_file import Place, describe


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
    path = f"/proc/self/fd/{place}" if isinstance(place, int) else os.fspath(place)
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
