"""An optimizer step in tiles: which pieces are updated together."""

from __future__ import annotations

from typing import Any

from torch.optim import LBFGS, Optimizer

__all__ = ["Tile", "tile"]

Tile = list[list[Any]]
"""The pieces of each parameter group."""


def tile(optimizer: Optimizer, limit: int) -> list[Tile]:
    """Pieces of about `limit` elements each, in order.

    None where the optimizer's step is more than the sum of its parameters' steps: one that counts its steps per group
    would count every tile. Those of torch and of this library keep all state with the parameters.
    """
    home = type(optimizer).__module__
    if isinstance(optimizer, LBFGS) or not home.startswith(("torch.optim.", "deepspeed.ops.")) or _mixes(optimizer):
        return []
    tiles: list[Tile] = []
    filled = limit
    for place, options in enumerate(optimizer.param_groups):
        for piece in options["params"]:
            if filled >= limit:
                tiles.append([[] for _ in optimizer.param_groups])
                filled = 0
            tiles[-1][place].append(piece)
            filled += piece.numel()
    return tiles


def _mixes(optimizer: Optimizer) -> bool:
    """True if pieces of different ranks meet in the step, which then is one for all."""
    return getattr(optimizer, "whole", None) is not None
