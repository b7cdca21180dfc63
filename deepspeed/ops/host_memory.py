"""The memory of tensors of the host, as buffers that files are read into and written from."""

from __future__ import annotations

import ctypes

from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["bytes_of"]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host, to read or to write; valid while the tensor lives."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(f"a contiguous tensor of the host was expected, not {tensor.device} and {tensor.stride()}")
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
