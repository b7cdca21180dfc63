"""An optimizer step in tiles: which pieces are updated together."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from deepspeed.zero.states.arena import Arena
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.runs import runs

__all__ = ["Tile", "choose", "empty_tile", "tile", "tiles_well", "twin"]


# What an engine sets on an optimizer of this library, and a copy of it does not have by itself.
_SHARED = ("new_state", "mixed")


@dataclass(frozen=True)
class Tile:
    """Pieces that are updated together."""

    params: list[list[nn.Parameter]]
    """What the optimizer updates, by its parameter groups."""
    pieces: list[Piece]
    """Those that live away from the device, in the order of the parameters; none in a tile on the device."""
    arena: Arena | None = None
    """Where they live, unless the optimizer takes all at once."""

    @property
    def away(self) -> bool:
        """True if it lives in another tier."""
        return bool(self.pieces)


def tiles_well(optimizer: Optimizer) -> bool:
    """True if a step is the sum of its parameters' steps, so that some may be updated now and others later.

    One that counts its steps per group would count every tile. Those of torch and of this library keep all state with
    the parameters.
    """
    home = type(optimizer).__module__
    known = f"{home}.".startswith(("torch.optim.", "deepspeed.ops."))
    return known and not isinstance(optimizer, LBFGS) and not _mixes(optimizer)


def tile(optimizer: Optimizer, away: Mapping[int, Piece], limit: int) -> list[Tile]:
    """Tiles of about `limit` elements each on the device, 0 for all at once; then one for each arena away from it.

    `away` are the pieces that live in another tier, by the id of their masters.
    """
    count = len(optimizer.param_groups)
    if not away and not limit:
        return [Tile([options["params"] for options in optimizer.param_groups], [])]
    rows = [
        _Row(place, master, away.get(id(master)))
        for place, options in enumerate(optimizer.param_groups)
        for master in options["params"]
    ]
    if not tiles_well(optimizer):
        return [_tile(rows, count)]
    arenas: dict[Arena, list[_Row]] = {}
    for row in rows:
        if row.piece is not None and row.piece.arena is not None:
            arenas.setdefault(row.piece.arena, []).append(row)
    here = [row for row in rows if row.piece is None]
    tiles = [_tile(run, count) for run in runs(here, lambda row: row.master.numel(), limit)]
    tiles += [replace(_tile(run, count), arena=arena) for arena, run in arenas.items()]
    return tiles or [_tile([], count)]  # an optimizer without parameters steps, too


def empty_tile(optimizer: Optimizer) -> Tile:
    """A tile without parameters."""
    return _tile([], len(optimizer.param_groups))


def choose(optimizer: Optimizer, tile: Tile) -> None:
    """Let the next step update the parameters of a tile alone."""
    for options, chosen in zip(optimizer.param_groups, tile.params, strict=True):
        options["params"] = chosen


def twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer that steps like this one does now, with the same states and groups of its own."""
    other = copy.copy(optimizer)
    other.param_groups = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
        for options in optimizer.param_groups
    ]
    for name in _SHARED:
        if name in vars(optimizer):
            setattr(other, name, vars(optimizer)[name])
    return other


@dataclass(frozen=True, slots=True)
class _Row:
    place: int
    """The number of the parameter group."""
    master: nn.Parameter
    piece: Piece | None


def _tile(rows: Sequence[_Row], count: int) -> Tile:
    params: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for row in rows:
        params[row.place].append(row.master)
    return Tile(params, [row.piece for row in rows if row.piece is not None])


def _mixes(optimizer: Optimizer) -> bool:
    """True if pieces of different ranks meet in the step, which then is one for all."""
    return getattr(optimizer, "whole", None) is not None
