"""The memory of tensors of the host, as buffers that files are read into and written from."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

from deepspeed.errors import UsageError


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host, to read or to write; valid while the tensor lives."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(f"a contiguous tensor of the host was expected, not {tensor.device} and {tensor.stride()}")
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """As an assignment between buffers of one size, but other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
