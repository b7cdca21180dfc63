"""A step over some of the pieces of an optimizer, which are at home; the rest have theirs at another time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.ops.one_pass import OnePass
from deepspeed.zero.states.group import ShardGroup
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.tiles import Tile, choose

__all__ = ["GroupOf", "one_pass_over", "update_some"]

GroupOf = Callable[[Piece], ShardGroup]
"""The group that a piece belongs to."""


def one_pass_over(pieces: Sequence[Piece], group_of: GroupOf, factor: float = 1.0) -> OnePass:
    """Gradients that were not cast, times `factor`, and where the model reads what the optimizer writes."""
    grads: dict[Tensor, Tensor] = {}
    outs: dict[Tensor, Tensor] = {}
    for piece in pieces:
        grad = group_of(piece).narrow_gradient(piece)
        if grad is not None:
            grads[piece.master] = grad
        if piece.separate:
            outs[piece.master] = piece.source
    return OnePass(factor, grads, outs)


@torch.no_grad()
def update_some(optimizer: Optimizer, pieces: Sequence[Piece], group_of: GroupOf, *, one_pass: bool) -> None:
    """Update some pieces, whose gradients were taken (`ShardGroup.take`) and are freed; other ranks see nothing yet."""
    everything = [options["params"] for options in optimizer.param_groups]
    places = {id(options): place for place, options in enumerate(optimizer.param_groups)}
    chosen: list[list[nn.Parameter]] = [[] for _ in everything]
    for piece in pieces:
        chosen[places[id(group_of(piece).options)]].append(piece.master)
    try:
        if one_pass:
            optimizer.one_pass = one_pass_over(pieces, group_of)  # type: ignore[attr-defined]
        choose(optimizer, Tile(chosen, []))
        optimizer.step()
    finally:
        if one_pass:
            optimizer.one_pass = None  # type: ignore[attr-defined]
        for options, params in zip(optimizer.param_groups, everything, strict=True):
            options["params"] = params
    copied = [piece for piece in pieces if piece.separate]
    if copied and not one_pass:
        torch._foreach_copy_([piece.source for piece in copied], [piece.master for piece in copied])
    for piece in pieces:
        group_of(piece).use_up(piece)
