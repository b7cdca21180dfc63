"""`Arena`: pieces that left the device together; their masters and gradients lie side by side, and are one tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepspeed.memory.host import host_empty
from deepspeed.memory.swap import Region, SwapFile
from deepspeed.memory.tier import Tier
from deepspeed.zero.states.late import Update
from deepspeed.zero.states.piece import Piece

if TYPE_CHECKING:
    from deepspeed.zero.states.group import Dtypes

__all__ = ["Arena", "move_out"]


class Arena:
    """Neighbouring pieces; in the order of the pieces, each kind of state of theirs is one flat tensor."""

    @torch.no_grad()
    def __init__(self, pieces: Sequence[Piece], dtypes: Dtypes) -> None:
        homes = dtypes.homes
        self.pieces = list(pieces)
        self.sizes = [piece.source.numel() for piece in pieces]
        self.numel = sum(self.sizes)
        self.turn: Update | None = None
        """The last step's update, of which nobody knows yet whether it is done."""
        self.swap: SwapFile | None = homes.swap
        self.regions: dict[str, Region] = {}
        """Where each kind of state rests on the disk; "master" and the optimizer's keys."""
        if self.swap is not None:
            master = self.room("master", dtypes.master, self.numel)
        else:  # only gradients cross to the device and back: what nobody copies need not be locked
            master = host_empty(self.numel, dtypes.master, pinned=False)
        gradients = host_empty(self.numel, dtypes.accumulate, pinned=homes.pinned).zero_()
        for piece, wide, home in zip(pieces, self.split(master), gradients.split(self.sizes), strict=True):
            wide.copy_(piece.source.detach())
            piece.leave(self, wide, home)

    def settle(self) -> None:
        """The memory of masters, moments and gradients is not in use any more."""
        if self.turn is not None:
            turn, self.turn = self.turn, None
            turn.wait()

    def split(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor of the arena as those of its pieces, each of the shape of its master."""
        parts = flat.split(self.sizes)
        return [part.view(piece.source.shape) for piece, part in zip(self.pieces, parts, strict=True)]

    def room(self, kind: str, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory on the disk for a kind of state; the same as long as its dtype and its size are."""
        assert self.swap is not None, "only an arena on the disk has regions"
        known = self.regions.get(kind)
        if known is None or (known.tensor.dtype, known.tensor.numel()) != (dtype, numel):
            known = self.regions[kind] = self.swap.take(numel, dtype)
        return known.tensor


def move_out(pieces: Sequence[Piece], dtypes: Dtypes) -> None:
    """Give pieces their homes off the device, and those that stay their masters on it.

    Where only a share leaves, the first ones stay: their gradients come last.
    """
    homes = dtypes.homes
    leaving = _leaving(pieces, homes.share) if homes.tier is not Tier.DEVICE else []
    for piece in pieces[: len(pieces) - len(leaving)]:
        piece.widen(dtypes.master, piece.param.device)
    for run in _runs(leaving, homes.tile):
        Arena(run, dtypes)


def _leaving(pieces: Sequence[Piece], share: float) -> list[Piece]:
    """The last ones, with at least that share of the elements; their gradients are the first to come."""
    total = sum(piece.source.numel() for piece in pieces)
    stays, kept = total - share * total, 0
    for place, piece in enumerate(pieces):
        kept += piece.source.numel()
        if kept > stays:
            return list(pieces[place:])
    return []


def _runs(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    """Neighbours of about `limit` elements together."""
    run: list[Piece] = []
    filled = 0
    for piece in pieces:
        if run and filled + piece.source.numel() > limit:
            yield run
            run, filled = [], 0
        run.append(piece)
        filled += piece.source.numel()
    if run:
        yield run
