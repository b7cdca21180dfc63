"""Parameters that travel as codes (qwZ): chunks to whole parameters, and updated blocks to all ranks.

A rank computes with what the codes say also of its own part, so that all ranks have the same parameters. What a user or
a checkpoint asks for comes exactly. Vectors and other small parameters travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.codec import BlockCodec
from deepspeed.zero.parameters.gather import FlatBlocks, Gather, GatherFor
from deepspeed.zero.parameters.shard import Shard

_SMALL = 2048  # elements below which codes would save less than they cost


def travels_coded(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a parameter is worth a code."""
    return len(shape) > 1 and shape.numel() >= _SMALL and dtype.is_floating_point


@dataclass(frozen=True)
class CodedGather:
    """In a pass as codes, which are made where the chunk lives; otherwise, and what is small, by `plain`."""

    codec: BlockCodec
    plain: Gather[Shard]

    @torch.no_grad()
    def start(self, shards: Sequence[Shard], serves: GatherFor) -> None:
        in_pass = serves in (GatherFor.FORWARD, GatherFor.BACKWARD)
        rest: list[Shard] = []
        kinds: dict[Any, list[Shard]] = {}
        for shard in shards:
            if in_pass and travels_coded(shard.shape, shard.dtype):
                kinds.setdefault(shard.axis, []).append(shard)
            else:
                rest.append(shard)
        for alike in kinds.values():
            self._together(alike)
        if rest:
            self.plain.start(rest, serves)

    def _together(self, shards: Sequence[Shard]) -> None:
        """One operation over the codes of chunks, side by side; decoded when it is through."""
        axis, codec = shards[0].axis, self.codec
        sizes = [codec.nbytes(shard.chunk) for shard in shards]
        mine = torch.empty(sum(sizes), dtype=torch.uint8, device=shards[0].device)
        for shard, message in zip(shards, mine.split(sizes), strict=True):
            if shard.data.device == message.device:
                codec.encode(shard.data, message)
            else:
                message.copy_(codec.encode(shard.data), non_blocking=True)
        gathered, work = mine, None
        if axis.size > 1:
            gathered = mine.new_empty(axis.size * mine.numel())
            with comm.labelled(f"{codec.name} codes of {shards[0].name} … {shards[-1].name}", codec=codec.name):
                work = comm.all_gather_into_tensor(gathered, mine, group=axis.group, async_op=True)

        def unpack(rows: Tensor) -> Tensor:
            for shard, messages in zip(shards, rows.view(axis.size, -1).split(sizes, dim=1), strict=True):
                if shard.pending is shared:  # it was not gathered again since
                    shard.allocate()
                    with torch.no_grad():
                        codec.decode(messages, shard.rows)
            return rows.new_empty(0)

        shared = Pending(gathered, work, unpack)
        for shard in shards:
            shard.pending = shared


@dataclass(frozen=True)
class CodedBlockGather:
    """Updated blocks of all ranks as codes, so many elements at a time."""

    codec: BlockCodec
    limit: int
    exact: bool = False
    """See `BlockGather`."""

    @torch.no_grad()
    def start(self, shards: Sequence[FlatBlocks], serves: GatherFor) -> None:
        for each in shards:
            with comm.labelled(f"{self.codec.name} codes of {each.name}", codec=self.codec.name):
                self._one(each)
            each.pending = Pending(None)

    def _one(self, each: FlatBlocks) -> None:
        world, block, codec = each.axis.size, each.sent.numel(), self.codec
        step = max(self.limit // world // codec.block, 1) * codec.block
        rows = each.flat.view(world, block)
        for at in range(0, block, step):
            mine = codec.encode(each.sent[at : at + step])
            gathered = mine.new_empty(world, mine.numel())
            comm.all_gather_into_tensor(gathered.view(-1), mine, group=each.axis.group)
            codec.decode(gathered, rows[:, at : at + step])
