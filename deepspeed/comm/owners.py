"""Reduce a flat tensor of which each rank owns a slice: every rank receives the sum of its own slice only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch.distributed as td
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm import collectives
from deepspeed.comm.groups import get_global_rank
from deepspeed.comm.pending import AllOf, Pending
from deepspeed.errors import CommError

__all__ = ["reduce_to_owners"]


def reduce_to_owners(
    tensor: Tensor,
    splits: Sequence[int],
    group: ProcessGroup | None = None,
    *,
    everywhere: bool = False,
    merged: bool = True,
) -> Pending[Tensor]:
    """Start summing `tensor` over the group; rank r of it receives the r-th of the consecutive `splits`.

    Uneven and empty splits are allowed. The tensor is used up: its content is undefined afterwards. `everywhere` takes
    an all-reduce, after which each rank picks its slice; the sum is the same. `merged` does so where several ranks own
    parts of different sizes, which backends cannot scatter in one operation; else each gets a reduction of its own.
    """
    world, rank = td.get_world_size(group), td.get_rank(group)
    if len(splits) != world or sum(splits) != tensor.numel():
        raise CommError(
            f"reduce_to_owners got {len(splits)} splits of {sum(splits)} elements for {world} ranks and a tensor of "
            f"{tensor.numel()}; give one split per rank, together as long as the tensor."
        )
    starts = [0, *accumulate(splits)]
    mine = tensor[starts[rank] : starts[rank + 1]]
    if world == 1:
        return Pending(mine)
    if everywhere:
        return Pending(mine, collectives.all_reduce(tensor, group=group, async_op=True))
    if str(td.get_backend(group)) == "gloo" and tensor.device.type == "cpu":
        return _by_exchange(tensor, splits, group)
    if len(set(splits)) == 1:
        out = tensor.new_empty(splits[0])
        return Pending(out, collectives.reduce_scatter_tensor(out, tensor, group=group, async_op=True))
    if merged and sum(map(bool, splits)) > 1:
        return Pending(mine, collectives.all_reduce(tensor, group=group, async_op=True))
    works = [
        collectives.reduce(tensor[start : start + length], get_global_rank(group, owner), group=group, async_op=True)
        for owner, (start, length) in enumerate(zip(starts, splits, strict=False))
        if length
    ]
    return Pending(mine, AllOf([work for work in works if work is not None]))


def _by_exchange(tensor: Tensor, splits: Sequence[int], group: ProcessGroup | None) -> Pending[Tensor]:
    """Send every slice to its owner, which adds them up in the order of the ranks.

    gloo's reduce-scatter moves twice the data and took four times as long; the fixed order of the sum also makes the
    result independent of how tensors are cut.
    """
    world, rank = td.get_world_size(group), td.get_rank(group)
    received = tensor.new_empty(world * splits[rank])
    work = collectives.all_to_all_single(
        received, tensor, [splits[rank]] * world, list(splits), group=group, async_op=True
    )

    def add(parts: Tensor) -> Tensor:
        rows = parts.view(world, splits[rank])
        return rows[0] + rows[1] if world == 2 else rows.sum(0)

    return Pending(received, work, add)
