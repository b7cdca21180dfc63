"""Pieces that leave the device: their masters and gradients side by side in host memory, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed.memory.host import host_empty
from deepspeed.zero.states.piece import Piece

if TYPE_CHECKING:
    from deepspeed.zero.states.group import Dtypes

__all__ = ["move_out"]


@torch.no_grad()
def move_out(pieces: Sequence[Piece], dtypes: Dtypes) -> None:
    """Give pieces their homes off the device, and those that stay their masters on it.

    Where only a share leaves, the first ones stay: their gradients come last.
    """
    homes = dtypes.homes
    leaving = _leaving(pieces, homes.share) if homes.away else []
    for piece in pieces[: len(pieces) - len(leaving)]:
        piece.widen(dtypes.master, piece.param.device)
    for run in _runs(leaving, homes.tile):
        sizes = [piece.source.numel() for piece in run]
        # Only gradients cross to the device and back: what nobody copies need not be locked.
        masters = host_empty(sum(sizes), dtypes.master, pinned=False)
        gradients = host_empty(sum(sizes), dtypes.accumulate, pinned=homes.pinned).zero_()
        for piece, wide, home in zip(run, masters.split(sizes), gradients.split(sizes), strict=True):
            wide = wide.view(piece.source.shape)
            wide.copy_(piece.source.detach())
            piece.leave(wide, home)


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
