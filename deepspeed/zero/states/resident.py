"""Stages 1 and 2: parameters stay whole on every rank, as views of one flat buffer of which each rank owns a block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.fragments import Block, intersection
from deepspeed.parallel import AxisGroup
from deepspeed.zero.gradients.bucket import Bucket, Cut, as_flat, runs
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup
from deepspeed.zero.states.piece import Piece

__all__ = ["ResidentGroup"]


class ResidentGroup(ShardGroup):
    """Whole parameters in one flat buffer; gradients and updates travel without being rearranged."""

    layout: Block

    def __init__(
        self,
        members: Sequence[Named],
        axis: AxisGroup,
        dtypes: Dtypes,
        options: dict[str, Any],
        *,
        gather_limit: int,
        aligned: bool = False,
    ) -> None:
        super().__init__(members, axis, dtypes, options)
        first = self.params[0]
        gap = max(16 // first.element_size(), 1) if aligned else 1
        self.layout = Block(tuple(param.numel() for param in self.params), axis.size, gap=gap)
        self._gather_limit = gather_limit
        self._whole = self._flatten(first)
        shard = self.layout.shard_numel
        self._shard = self._whole[axis.rank * shard : (axis.rank + 1) * shard]
        self._make_pieces()

    def _flatten(self, first: nn.Parameter) -> Tensor:
        """Move the parameters into one buffer; they stay the same objects."""
        whole = torch.zeros(self.layout.padded, dtype=first.dtype, device=first.device)
        for param, start, numel in zip(self.params, self.layout.starts, self.layout.numels, strict=True):
            home = whole[start : start + numel].view(param.shape)
            home.copy_(param.detach())
            param.data = home
        return whole

    def _make_pieces(self) -> None:
        rank, dtype = self.axis.rank, self.dtypes.master
        # One wide copy of the whole shard; the masters are views of it, so that publishing is one copy too.
        self._master = self._shard if self._shard.dtype == dtype else self._shard.to(dtype)
        for place in self.layout.members(rank):
            start, stop = self.layout.interval(place, rank)
            if start == stop:
                continue
            at = self.layout.position(place, rank)
            param = self.params[place]
            piece = Piece(self.names[place], param, param.shape, (start, stop), self._shard[at : at + stop - start])
            piece.master = nn.Parameter(self._master[at : at + stop - start], requires_grad=True)
            self.pieces.append(piece)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into this rank's block, and gather the blocks of all ranks."""
        if self._master is not self._shard:
            self._shard.copy_(self._master)
        for piece in self.pieces:
            piece.version = piece.param._version
        shard, group = self.layout.shard_numel, self.axis.group
        with comm.labelled(f"updated parameters {self.names[0]} … {self.names[-1]}"):
            if self.layout.padded <= self._gather_limit:
                comm.all_gather_into_tensor(self._whole, self._shard, group=group)
                return
            step = max(self._gather_limit // self.axis.size, 1)
            for at in range(0, shard, step):
                size = min(step, shard - at)
                parts = [self._whole.narrow(0, rank * shard + at, size) for rank in range(self.axis.size)]
                comm.all_gather(parts, parts[self.axis.rank].clone(), group=group)

    @torch.no_grad()
    def publish_one(self, place: int) -> None:
        """As `publish`, for the parameter at that place."""
        start, numel = self.layout.starts[place], self.layout.numels[place]
        values = torch.zeros(numel, dtype=self._whole.dtype, device=self._whole.device)
        for piece in self.pieces:
            if piece.param is self.params[place]:
                values[piece.interval[0] : piece.interval[1]].copy_(piece.master)
        with comm.labelled(f"updated parameter {self.names[place]}"):
            comm.all_reduce(values, group=self.axis.group)
        self._whole[start : start + numel].copy_(values)

    def buckets(self, limit: int) -> list[Bucket]:
        """Runs of neighbours in the flat buffer."""
        return [self._bucket(run) for run in runs(self.layout.numels, limit)]

    def _bucket(self, run: range) -> Bucket:
        layout, me = self.layout, self.axis.rank
        begin, end = layout.starts[run.start], layout.starts[run.stop - 1] + layout.numels[run.stop - 1]
        shard = layout.shard_numel
        slices = [intersection((begin, end), (rank * shard, (rank + 1) * shard)) for rank in range(self.axis.size)]
        here = slices[me][0] - me * shard  # where the slice that comes here begins in this rank's block
        inside = {id(self.params[place]) for place in run}
        cuts = []
        for piece in self.pieces:
            if id(piece.param) in inside:
                at = int(piece.source.storage_offset() - self._shard.storage_offset()) - here
                cuts.append(Cut(piece, at, at + piece.source.numel()))
        return Bucket(
            names=[self.names[place] for place in run],
            params=[self.params[place] for place in run],
            take=[partial(take_gradient, self.params[place]) for place in run],
            pack=partial(self._pack, run),
            splits=[stop - start for start, stop in slices],
            cuts=cuts,
            group=self.axis.group,
            accumulate=self.dtypes.accumulate,
        )

    def _pack(self, run: range, grads: Sequence[Tensor | None]) -> Tensor:
        layout, dtype, device = self.layout, self.dtypes.reduce, self._whole.device
        parts: list[Tensor] = []
        end = layout.starts[run.start]
        for place, grad in zip(run, grads, strict=True):
            if layout.starts[place] > end:
                parts.append(torch.zeros(layout.starts[place] - end, dtype=dtype, device=device))
            parts.append(as_flat(grad, layout.numels[place], dtype, device))
            end = layout.starts[place] + layout.numels[place]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def take_gradient(param: nn.Parameter) -> Tensor | None:
    """The gradient that autograd left on the parameter, which forgets it."""
    grad, param.grad = param.grad, None
    return grad
