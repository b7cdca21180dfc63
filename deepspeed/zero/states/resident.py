"""Stages 1 and 2: parameters stay whole on every rank, as views of one flat buffer of which each rank owns a block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.fragments import Block
from deepspeed.zero.gradients.bucket import Parcel
from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.parameters.data import show
from deepspeed.zero.parameters.parameter import ResidentParameter, watch
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.arena import move_out
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup
from deepspeed.zero.states.piece import Piece

__all__ = ["ResidentGroup"]


class ResidentGroup(ShardGroup):
    """Whole parameters in one flat buffer; gradients and updates travel without being rearranged."""

    layout: Block

    def __init__(
        self,
        members: Sequence[Named],
        placement: Placement,
        dtypes: Dtypes,
        options: dict[str, Any],
        *,
        gather_limit: int,
        aligned: bool = False,
    ) -> None:
        super().__init__(members, placement, dtypes, options)
        axis, first = self.axis, self.params[0]
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
            show(param, home)
            watch(param, ResidentParameter)
            self.homes.append(home)
        return whole

    def _make_pieces(self) -> None:
        rank, dtype = self.axis.rank, self.dtypes.master
        # One wide copy of the whole shard; the masters are views of it, so that publishing is one copy too.
        self._master: Tensor | None = None
        if not self.dtypes.homes.away:
            self._master = self._shard if self._shard.dtype == dtype else self._shard.to(dtype)
        for place in self.layout.members(rank):
            start, stop = self.layout.interval(place, rank)
            if start == stop:
                continue
            at = self.layout.position(place, rank)
            param = self.params[place]
            piece = Piece(self.names[place], param, param.shape, (start, stop), self._shard[at : at + stop - start])
            if self._master is not None:
                piece.master = nn.Parameter(self._master[at : at + stop - start], requires_grad=True)
            self.pieces.append(piece)
        if self._master is None:
            move_out(self.pieces, self.dtypes)

    def round(self) -> None:
        """See `ShardGroup`; where all masters lie side by side that is one copy."""
        if self._master is None:
            super().round()
        elif self._master is not self._shard:
            with torch.no_grad():
                self._shard.copy_(self._master)

    @torch.no_grad()
    def spread(self) -> None:
        """Gather the blocks of all ranks."""
        for piece in self.pieces:
            piece.mark()
        with comm.labelled(f"updated parameters {self.names[0]} … {self.names[-1]}"):
            self._gather()

    def _gather(self) -> None:
        """Blocks of all ranks into the flat buffer; in place, or through a smaller one where backends need a copy."""
        shard, world, group = self.layout.shard_numel, self.axis.size, self.axis.group
        if self.layout.padded <= self._gather_limit or self._whole.device.type != "cpu":
            comm.all_gather_into_tensor(self._whole, self._shard, group=group)
            return
        rows = self._whole.view(world, shard)
        step = max(self._gather_limit // world, 1)
        for at in range(0, shard, step):
            mine = self._shard[at : at + step]
            some = mine.new_empty(world, len(mine))
            comm.all_gather_into_tensor(some.view(-1), mine.contiguous(), group=group)
            rows[:, at : at + step].copy_(some)

    @torch.no_grad()
    def publish_one(self, place: int) -> None:
        """Bring the master of the parameter at that place into the model."""
        start, numel = self.layout.starts[place], self.layout.numels[place]
        values = torch.zeros(numel, dtype=self._whole.dtype, device=self._whole.device)
        for piece in self.pieces:
            if piece.param is self.params[place]:
                values[piece.interval[0] : piece.interval[1]].copy_(piece.master)
        with comm.labelled(f"updated parameter {self.names[place]}"):
            comm.all_reduce(values, group=self.axis.group)
        self._whole[start : start + numel].copy_(values)

    def parcels(self, reduction: Reduction) -> list[Parcel]:
        """A parameter lies on the rank, or the few neighbours, whose blocks it falls into."""
        piece_of = {id(piece.param): piece for piece in self.pieces}
        found = []
        for place, param in enumerate(self.params):
            found.append(
                Parcel(
                    name=self.names[place],
                    param=param,
                    numel=self.layout.numels[place],
                    take=partial(take_gradient, param),
                    piece=piece_of.get(id(param)),
                    reduction=reduction,
                    dtype=self.dtypes.reduce,
                    accumulate=self.dtypes.accumulate,
                    device=self._whole.device,
                    owners=self.layout.holders(place),
                    interval=partial(self.layout.interval, place),
                )
            )
        return found


def take_gradient(param: nn.Parameter) -> Tensor | None:
    """The gradient that autograd left on the parameter, which forgets it."""
    grad, param.grad = param.grad, None
    return grad
