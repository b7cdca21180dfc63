"""What one rank wrote into parameters that are whole on every rank, for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.coalesced import broadcast_coalesced
from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.zero.parameters.data import plain_data
from deepspeed.zero.states.states import States

__all__ = ["spread_edits"]


@torch.no_grad()
def spread_edits(states: States, params: Sequence[nn.Parameter], modifier: int) -> None:
    """Give the values of the rank `modifier`, of those that hold a parameter, to all of them; masters follow."""
    states.settle()
    axes: dict[AxisGroup, list[nn.Parameter]] = {}
    for param in params:
        axis = states.ranks_of(param)
        if not 0 <= modifier < axis.size:
            raise UsageError(
                f"GatheredParameters: modifier_rank is {modifier}, but a parameter of shape {tuple(param.shape)} lies "
                f"on {axis.size} ranks"
            )
        axes.setdefault(axis, []).append(param)
    chosen = set(map(id, params))
    for group in states.groups:
        for place, param in enumerate(group.params):
            if id(param) in chosen:
                group.reclaim(place)
    for axis, alike in axes.items():
        if axis.size > 1:
            with comm.labelled("parameters that one rank modified"):
                broadcast_coalesced([plain_data(p) for p in alike], src=axis.ranks[modifier], group=axis.group)
    for piece in (piece for group in states.groups for piece in group.pieces):
        if id(piece.param) in chosen:
            piece.adopt()
