"""Stage 3: every parameter is cut by itself, and whole only while it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.fragments import Striped
from deepspeed.memory.tier import AT_HOME
from deepspeed.zero.gradients.bucket import Parcel
from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.parameter import plain_grad
from deepspeed.zero.parameters.shard import Shard, shard_of, used_while_empty
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.arena import move_out
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup
from deepspeed.zero.states.late import Update
from deepspeed.zero.states.piece import Piece

__all__ = ["StripedGroup"]


class StripedGroup(ShardGroup):
    """Parameters that are sharded already, and the pieces of them that this rank updates."""

    layout: Striped

    def __init__(
        self,
        members: Sequence[Named],
        placement: Placement,
        dtypes: Dtypes,
        options: dict[str, Any],
        *,
        arrived: Callable[[Shard], None] | None,
    ) -> None:
        """`arrived` is told of every gradient that is taken."""
        super().__init__(members, placement, dtypes, options)
        self._arrived = arrived
        self.shards = [_need(name, shard_of(param)) for name, param in members]
        self.layout = Striped(tuple(shard.numel for shard in self.shards), self.axis.size)
        self._piece_of: dict[int, Piece] = {}
        for shard, name in zip(self.shards, self.names, strict=True):
            if shard.local.numel():
                piece = Piece(name, shard.param, shard.shape, shard.interval, shard.local)
                piece.version = shard.edits, 0
                self.pieces.append(piece)
                self._piece_of[id(shard)] = piece
        lasting = {id(shard.param) for shard in self.shards if shard.persistent}
        # The states of what stays whole on the device stay there, too: it is small, and all ranks meet for it.
        move_out([piece for piece in self.pieces if id(piece.param) in lasting], replace(dtypes, homes=AT_HOME))
        move_out([piece for piece in self.pieces if id(piece.param) not in lasting], dtypes)

    def adopt_edits(self) -> None:
        """Take over parameters that somebody wrote since the last step, instead of undoing that silently."""
        for shard in self.shards:
            if shard.persistent and shard.edited:
                shard.store()
            piece = self._piece_of.get(id(shard))
            if piece is not None and (shard.edits, 0) != piece.version:
                piece.adopt()
                piece.version = shard.edits, 0

    @property
    def patient(self) -> bool:
        """See `ShardGroup`; a parameter that is gathered waits for its chunk."""
        return True

    def await_update(self, piece: Piece, turn: Update) -> None:
        """See `ShardGroup`."""
        shard = _need(piece.name, shard_of(piece.param))
        shard.late = turn

    @torch.no_grad()
    def spread(self) -> None:
        """Parameters that stay whole are gathered again; the others when they are used."""
        lasting = [shard for shard in self.shards if shard.persistent]
        if lasting:
            fetch.gather(lasting)

    @torch.no_grad()
    def publish_one(self, place: int) -> None:
        """Bring the master of the parameter at that place into the model; one that is whole now is gathered again."""
        shard = self.shards[place]
        piece = self._piece_of.get(id(shard))
        if piece is not None and piece.separate:
            piece.source.copy_(piece.master)
        if shard.whole:
            fetch.gather([shard])

    def whole_gradients(self) -> Iterator[Tensor]:
        """Gradients that were not reduced yet."""
        yield from super().whole_gradients()
        for shard in self.shards:
            if shard.gradient is not None:
                yield shard.gradient

    def on_arrival(self, param: nn.Parameter) -> Callable[[], None] | None:
        """Take the gradient from a parameter that will not stay whole."""
        shard = _need("", shard_of(param))
        if shard.persistent and self._arrived is None:
            return None
        return partial(_stash, shard, self._arrived)

    def forget(self) -> None:
        """Drop gradients that were not reduced."""
        for shard in self.shards:
            shard.gradient = None

    def parcels(self, reduction: Reduction) -> list[Parcel]:
        """Every rank owns its chunk of every parameter."""
        return [
            Parcel(
                name=name,
                param=shard.param,
                numel=shard.numel,
                take=partial(_take, shard),
                piece=self._piece_of.get(id(shard)),
                reduction=reduction,
                dtype=self.dtypes.reduce,
                accumulate=self.dtypes.accumulate,
                device=shard.device,
                chunk=shard.chunk,
                rows=shard.shape[0] if shard.shape else 0,
            )
            for name, shard in zip(self.names, self.shards, strict=True)
        ]


def _need(name: str, shard: Shard | None) -> Shard:
    if shard is None:
        raise TypeError(f"parameter {name!r} is not sharded")
    return shard


def _stash(shard: Shard, arrived: Callable[[Shard], None] | None) -> None:
    if not shard.persistent:
        shard.gradient = _take(shard)
    if arrived is not None:
        arrived(shard)


def _take(shard: Shard) -> Tensor | None:
    """The whole gradient of a parameter, wherever it waits; it is forgotten there."""
    waiting, shard.gradient = shard.gradient, None
    grad = plain_grad(shard.param)
    if grad is not None:
        shard.param.grad = None
    if grad is not None and grad.numel() != shard.numel:
        raise UsageError(used_while_empty(shard.name))
    if waiting is not None and grad is not None:
        return waiting.add_(grad)
    return waiting if grad is None else grad
