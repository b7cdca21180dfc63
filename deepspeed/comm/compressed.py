"""The mean over ranks in one bit per number: signs with one scale, and what they leave out for the next time.

Each rank adds its own error, sends the signs of its part to the rank that owns a chunk of it, which takes the mean of
what ranks mean, adds its error, and sends the signs of that to all. `NcclBackend` and the others of DeepSpeed are this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.codec import SIGN
from deepspeed.comm.collectives import all_gather_into_tensor, all_to_all_single
from deepspeed.comm.dispatch import DEFAULT, labelled
from deepspeed.comm.groups import get_rank, get_world_size
from deepspeed.errors import UsageError
from deepspeed.ops.codecs import rows as numbers


def chunk_of(numel: int, ranks: int) -> int:
    """Elements of which each rank takes the mean, the last ones of fewer: bytes of signs are not shared."""
    return -(-numel // (8 * ranks)) * 8


@dataclass(frozen=True, slots=True)
class SignErrors:
    """What the signs of one tensor left out so far, in float32."""

    worker: Tensor
    """Of the elements that this rank sent, all of them."""
    server: Tensor
    """Of the chunk whose mean this rank took."""

    @classmethod
    def zero(cls, like: Tensor, ranks: int) -> SignErrors:
        """Of a tensor that was not sent yet."""
        worker = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        return cls(worker, worker.new_zeros(chunk_of(like.numel(), ranks)))


@torch.no_grad()
def sign_mean(values: Sequence[Tensor], errors: Sequence[SignErrors], group: Any = None) -> None:
    """Replace float32 tensors of one dimension by what is left of their means over ranks; errors follow.

    All of them travel in two messages. The scale of a tensor, or of a chunk of it, is ‖x‖₂ / √n.
    """
    if not values:
        return
    ranks, rank = get_world_size(group), get_rank(group)
    chunks = [len(error.server) for error in errors]
    sizes = [SIGN.nbytes(chunk) for chunk in chunks]
    sent = values[0].new_zeros(ranks, sum(sizes), dtype=torch.uint8)
    for value, error, chunk, rows in zip(values, errors, chunks, sent.split(sizes, dim=1), strict=True):
        value.add_(error.worker[: value.numel()])
        padded = torch.nn.functional.pad(value, (0, chunk * ranks - value.numel()))
        meant = _write(padded.view(ranks, chunk), _scale(value), rows)
        torch.sub(value, meant.view(-1)[: value.numel()], out=error.worker[: value.numel()])
    came = torch.empty_like(sent)
    with labelled(DEFAULT.label, codec=SIGN.name):
        all_to_all_single(came, sent, group=group)
    mine = sent.new_zeros(1, sent.shape[1])
    parts = zip(values, errors, chunks, came.split(sizes, dim=1), mine.split(sizes, dim=1), strict=True)
    for value, error, chunk, rows, own in parts:
        mean = SIGN.decode_sum(rows, value.new_empty(chunk)).div_(ranks).add_(error.server)
        length = min(max(value.numel() - rank * chunk, 0), chunk)
        meant = _write(mean.view(1, -1), _scale(mean[:length]), own)
        error.server[:length] = mean[:length] - meant.view(-1)[:length]
    everything = torch.empty_like(sent)
    with labelled(DEFAULT.label, codec=SIGN.name):
        all_gather_into_tensor(everything.view(-1), mine.view(-1), group=group)
    for value, chunk, rows in zip(values, chunks, everything.split(sizes, dim=1), strict=True):
        value.copy_(SIGN.decode(rows, value.new_empty(ranks, chunk)).view(-1)[: value.numel()])


def _write(values: Tensor, scale: Tensor, message: Tensor) -> Tensor:
    """Write the signs of rows and one scale for all of them; returns what they mean."""
    signs, scales = SIGN.parts(message, values.shape[-1])
    numbers.signs(values, signs)
    scales.copy_(scale)
    return SIGN.decode(message, torch.empty_like(values))


def _scale(values: Tensor) -> Tensor:
    scale: Tensor = torch.linalg.vector_norm(values) / max(values.numel(), 1) ** 0.5
    return scale


class CompressedBackend:
    """`compressed_allreduce` over the ranks of `mpu`'s data-parallel group, or all; on any device and backend."""

    def __init__(self, mpu: Any = None) -> None:
        self.world_group = None if mpu is None else mpu.get_data_parallel_group()
        self.size, self.rank = get_world_size(self.world_group), get_rank(self.world_group)

    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int = 0
    ) -> Tensor:
        """The mean of `buffer_m`, in place, through signs; `local_rank` is not needed.

        `worker_error` has an element for each, or more up to `size` times those of `server_error`.
        """
        chunk, numel = server_error.numel(), buffer_m.numel()
        if chunk * self.size < numel or worker_error.numel() < numel or chunk % 8:
            raise UsageError(
                f"compressed_allreduce: a buffer of {numel} elements over {self.size} ranks needs a worker_error of at "
                f"least {numel} and a server_error of a multiple of 8, at least {chunk_of(numel, self.size)}; found "
                f"{worker_error.numel()} and {chunk}"
            )
        for name, error in (("worker_error", worker_error), ("server_error", server_error)):
            if error.dtype != torch.float32 or not error.is_contiguous():
                raise UsageError(f"compressed_allreduce: {name} is {error.dtype}; expected contiguous float32")
        flat = buffer_m.detach().reshape(-1).to(torch.float32, copy=True)
        sign_mean([flat], [SignErrors(worker_error.view(-1), server_error.view(-1))], self.world_group)
        buffer_m.detach().copy_(flat.view(buffer_m.shape))
        return buffer_m
