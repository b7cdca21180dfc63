"""`SequenceChunk`: a part of a sequence that lives in host memory and is on the device while it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.memory.lane import Direct, Lane, Ticket

__all__ = ["SequenceChunk", "in_turn"]


class SequenceChunk:
    """A tensor's copy in host memory, and on the device from `load_to_gpu` to `offload`.

    `is_in_use` keeps the tensor itself on the device until `offload`. Values come back to `device`, or to where the
    tensor was, along `lane`, beside what computes; they leave in the order of what computes.
    """

    def __init__(self, chunk: Tensor, device: Any = None, is_in_use: bool = False, *, lane: Lane | None = None) -> None:
        self.chunk_shape, self.chunk_dtype = chunk.shape, chunk.dtype
        self.device = chunk.device if device is None else torch.device(device)
        self.cpu_chunk = get_accelerator().pin_empty(chunk.shape, dtype=chunk.dtype)
        self.cpu_chunk.copy_(chunk.detach(), non_blocking=True)
        self.gpu_chunk: Tensor | None = chunk if is_in_use else None
        self._lane = Direct() if lane is None else lane
        self._ticket: Ticket | None = None

    def load_to_gpu(self) -> None:
        """Begin to bring the values to the device; nothing where they are there."""
        if self.gpu_chunk is None:
            self.gpu_chunk = torch.empty(self.chunk_shape, dtype=self.chunk_dtype, device=self.device)
            self._ticket = self._lane.copy(self.gpu_chunk, self.cpu_chunk)

    def get_gpu_chunk(self) -> Tensor:
        """The values on the device."""
        self.check_gpu_chunk()
        if self._ticket is not None:
            self._ticket.join()
            self._ticket = None
        assert self.gpu_chunk is not None, "looked at above"
        return self.gpu_chunk

    def check_gpu_chunk(self) -> None:
        """Raise if the values are not on the device."""
        if self.gpu_chunk is None:
            raise UsageError(
                f"a SequenceChunk of shape {tuple(self.chunk_shape)} is in host memory only; call load_to_gpu() before "
                "it is used on the device."
            )

    def offload(self) -> None:
        """Let go of the device's memory; what was changed there since is lost, unless it was written back."""
        if self._ticket is not None:
            self._ticket.join()
        self.gpu_chunk, self._ticket = None, None

    def overwrite_to_cpu(self) -> None:
        """Write the values of the device back to host memory."""
        self.cpu_chunk.copy_(self.get_gpu_chunk().detach(), non_blocking=True)


def in_turn(groups: Iterable[tuple[SequenceChunk, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """The values of some chunks after those of others; the next ones come while these are used."""
    waiting: tuple[SequenceChunk, ...] | None = None
    for group in (*groups, None):
        for chunk in group or ():
            chunk.load_to_gpu()
        if waiting is not None:
            yield tuple(chunk.get_gpu_chunk() for chunk in waiting)
            for chunk in waiting:
                chunk.offload()
        waiting = group
