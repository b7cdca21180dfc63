"""Whole parameters on every rank whose masters, moments and gradients live in another tier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from deepspeed.fragments import Block
from deepspeed.zero.gradients.bucket import Parcel
from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.parameters.data import plain_data
from deepspeed.zero.parameters.parameter import watch
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.arena import move_out
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup
from deepspeed.zero.states.late import Update, postpone
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.resident import take_gradient

__all__ = ["HousedGroup"]


class HousedGroup(ShardGroup):
    """Nobody shares the states: one rank, or stage 0. Gradients leave the device as they come, as shards do."""

    layout: Block

    def __init__(self, members: Sequence[Named], placement: Placement, dtypes: Dtypes, options: dict[str, Any]) -> None:
        super().__init__(members, placement, dtypes, options)
        self.layout = Block(tuple(param.numel() for param in self.params), 1)
        for name, param in members:
            if not param.is_contiguous():  # gradients leave as flat tensors
                param.data = param.data.contiguous()
            home = plain_data(param)
            self.pieces.append(Piece(name, param, param.shape, (0, param.numel()), home))
            self.homes.append(home)
            watch(param)
        move_out(self.pieces, dtypes)

    @property
    def whole(self) -> bool:
        """See `ShardGroup`."""
        return True

    @property
    def patient(self) -> bool:
        """See `ShardGroup`."""
        return True

    @property
    def marks(self) -> bool:
        """See `ShardGroup`."""
        return True

    def await_update(self, piece: Piece, turn: Update) -> None:
        """See `ShardGroup`."""
        postpone(piece.param, turn)

    def spread(self) -> None:
        """Every rank has all of it already."""
        for piece in self.pieces:
            piece.mark()

    @torch.no_grad()
    def publish_one(self, place: int) -> None:
        """Bring the master of the parameter at that place into the model."""
        self.pieces[place].source.copy_(self.pieces[place].master)

    def parcels(self, reduction: Reduction) -> list[Parcel]:
        """This rank owns everything."""
        return [
            Parcel(
                name=piece.name,
                param=piece.param,
                numel=piece.param.numel(),
                take=partial(take_gradient, piece.param),
                piece=piece,
                reduction=reduction,
                dtype=self.dtypes.reduce,
                accumulate=self.dtypes.accumulate,
                device=piece.param.device,
                chunk=piece.param.numel(),
            )
            for piece in self.pieces
        ]
