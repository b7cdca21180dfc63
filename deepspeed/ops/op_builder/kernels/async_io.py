"""Op `async_io`."""

from __future__ import annotations

from torch import Tensor

from deepspeed.ops.aio.handle import aio_handle

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]


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
