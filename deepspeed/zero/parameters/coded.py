"""Parameters that travel as codes (qwZ): chunks to whole parameters, and updated blocks to all ranks.

A rank computes with what the codes say also of its own part, so that all ranks have the same parameters. What a user or
a checkpoint asks for comes exactly. Vectors and other small parameters travel as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.codec import BlockCodec, Codec
from deepspeed.errors import UsageError
from deepspeed.log import NOTICE, log_dist, warn_once
from deepspeed.zero.parameters.gather import PLAIN, FlatBlocks, Gather, GatherFor, NodeHops, gather_rows
from deepspeed.zero.parameters.shard import Shard, rest_as, shards_of

_SMALL = 2048  # elements below which codes would save less than they cost


def travels_coded(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a parameter is worth a code."""
    return len(shape) > 1 and shape.numel() >= _SMALL and dtype.is_floating_point


@dataclass(frozen=True)
class CodedGather:
    """In a pass as codes, which are made where the chunk lives; otherwise, and what is small, by `plain`.

    What rests as codes travels as these, always.
    """

    codec: BlockCodec | None
    """None: only what rests as codes."""
    plain: Gather[Shard]
    hops: NodeHops | None = None

    @torch.no_grad()
    def start(self, shards: Sequence[Shard], serves: GatherFor) -> None:
        in_pass = serves in (GatherFor.FORWARD, GatherFor.BACKWARD)
        rest: list[Shard] = []
        kinds: dict[Any, list[Shard]] = {}
        for shard in shards:
            worth = in_pass and self.codec is not None and travels_coded(shard.shape, shard.dtype)
            if worth or shard.codec is not None:
                kinds.setdefault(shard.axis, []).append(shard)
            else:
                rest.append(shard)
        for alike in kinds.values():
            self._together(alike)
        if rest:
            self.plain.start(rest, serves)

    def _together(self, shards: Sequence[Shard]) -> None:
        """One operation over the codes of chunks, side by side; decoded when it is through."""
        axis, codecs = shards[0].axis, [self._codec_of(shard) for shard in shards]
        sizes = [codec.nbytes(shard.chunk) for codec, shard in zip(codecs, shards, strict=True)]
        mine = torch.empty(sum(sizes), dtype=torch.uint8, device=shards[0].device)
        if self.codec is not None and all(_is_here(shard) for shard in shards):
            ends = list(accumulate(shard.chunk for shard in shards))
            parts = tuple((end - shard.chunk, shard.chunk) for end, shard in zip(ends, shards, strict=True))
            chunks = torch.cat([shard.stored for shard in shards])
            self.codec.encode_parts(parts, chunks.view(1, -1), mine.view(1, -1))
        else:
            for shard, codec, message in zip(shards, codecs, mine.split(sizes), strict=True):
                codes = codec.encode(shard.stored) if shard.codec is None else shard.stored
                message.copy_(codes, non_blocking=True)
        name = " and ".join(dict.fromkeys(codec.name for codec in codecs))
        gathered, work = mine, None
        if axis.size > 1:
            with comm.labelled(f"{name} codes of {shards[0].name} … {shards[-1].name}", codec=name):
                work = gather_rows(mine, axis, self.hops)
            gathered = work.result

        def unpack(rows: Tensor) -> Tensor:
            parts = rows.view(axis.size, -1).split(sizes, dim=1)
            for shard, codec, messages in zip(shards, codecs, parts, strict=True):
                if shard.pending is shared:  # it was not gathered again since
                    shard.allocate()
                    with torch.no_grad():
                        codec.decode(messages, shard.rows)
            return rows.new_empty(0)

        shared = Pending(gathered, work, unpack)
        for shard in shards:
            shard.pending = shared

    def _codec_of(self, shard: Shard) -> Codec:
        codec = self.codec if shard.codec is None else shard.codec
        assert codec is not None, "what rests in its dtype travels plain without a codec"
        return codec


def _is_here(shard: Shard) -> bool:
    """Whether numbers lie on the device."""
    return shard.codec is None and shard.stored.device == shard.device


def travel_as_codes(shard: Shard, ways: dict[int, CodedGather]) -> None:
    """Let a shard that rests as codes become whole from these; `ways` has a gather for each plain one."""
    if not isinstance(shard.gather, CodedGather):
        plain = shard.gather or PLAIN
        shard.gather = ways.setdefault(id(plain), CodedGather(None, plain))


@dataclass(frozen=True)
class RestingWeights:
    """Frozen weights of a model, which rest as codes."""

    module: nn.Module
    codec: BlockCodec

    def take(self, held: Callable[[nn.Parameter], object] | None = None) -> None:
        """Let those that are frozen now rest as codes, on all ranks together; not small ones, nor those `held`."""
        ways: dict[int, CodedGather] = {}
        count, kept = 0, list[str]()
        for shard in shards_of(self.module.parameters()):
            small = shard.persistent or not travels_coded(shard.shape, shard.dtype)
            if shard.param.requires_grad or small or shard.codec is not None:
                continue
            if shard.holds:
                raise UsageError(
                    f"{shard.name} is whole at the moment, inside deepspeed.zero.GatheredParameters; leave that before "
                    "frozen weights are quantised"
                )
            if held is not None and held(shard.param) is not None:
                kept.append(shard.name)
                continue
            if shard.whole:
                shard.release()
            rest_as(shard, self.codec)
            travel_as_codes(shard, ways)
            if shard.near is not None:  # a copy of neighbours may be larger than the codes of all
                shard.near.leave()
                shard.near = None
            count += shard.numel
        if kept:
            warn_once(
                f"{len(kept)} frozen weights, {kept[0]} the first, are not quantised: the optimizer has states of them."
                " Freeze weights before deepspeed.initialize, or leave them out of the optimizer."
            )
        log_dist(f"{count:,} frozen parameters rest as {self.codec.name} codes", [0], NOTICE)


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
