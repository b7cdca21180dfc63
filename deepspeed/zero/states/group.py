"""`ShardGroup`: the only owner of the memory of a set of parameters that are spread over the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.fragments import FlatLayout, Fragment
from deepspeed.zero.gradients.bucket import Parcel
from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.piece import Piece

__all__ = ["Dtypes", "Named", "ShardGroup"]

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class Dtypes:
    """In what the parts of a group's state are held."""

    master: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype


class ShardGroup:
    """Parameters of one dtype, one optimizer group and one placement.

    What is common to all residencies is here: the pieces that the optimizer updates. Where the whole parameters live,
    how gradients are laid out for their owners, and how updates return are the business of the two subclasses.
    """

    layout: FlatLayout

    def __init__(self, members: Sequence[Named], placement: Placement, dtypes: Dtypes, options: dict[str, Any]) -> None:
        self.names = [name for name, _ in members]
        self.params = [param for _, param in members]
        self.placement = placement
        self.axis = placement.shard
        self.dtypes = dtypes
        self.options = options
        """The optimizer's own dict of this parameter group."""
        self.pieces: list[Piece] = []
        """Those that have elements on this rank."""

    def parcels(self, reduction: Reduction) -> list[Parcel]:
        """The gradients of its parameters, as the way to their owners sees them."""
        raise TypeError(f"{type(self).__name__} lays out no gradients")

    def whole_gradients(self) -> Iterator[Tensor]:
        """Gradients that were not reduced yet."""
        for param in self.params:
            if param.grad is not None:
                yield param.grad

    def on_arrival(self, param: nn.Parameter) -> Callable[[], None] | None:
        """What to do at once when a parameter's gradient arrives; None if nothing."""
        return None

    def forget(self) -> None:
        """Drop gradients that were not reduced."""
        for param in self.params:
            param.grad = None

    def publish(self) -> None:
        """Make the updated masters the parameters of every rank."""
        raise TypeError(f"{type(self).__name__} holds no parameters")

    def publish_one(self, place: int) -> None:
        """As `publish`, for the parameter at that place."""
        raise TypeError(f"{type(self).__name__} holds no parameters")

    def adopt_edits(self) -> None:
        """Take over parameters that somebody wrote since the last step, instead of undoing that silently."""
        for piece in self.pieces:
            if piece.param._version != piece.version:
                piece.adopt()
                piece.version = piece.param._version

    def fragments(self, states: Mapping[Any, dict[str, Any]]) -> Iterator[Fragment]:
        """Masters and the optimizer's tensors of this rank; `states` is the optimizer's."""
        for piece in self.pieces:
            yield self._fragment(piece, "master", piece.master.detach())
            for kind, value in states.get(piece.master, {}).items():
                if isinstance(value, Tensor) and value.shape == piece.master.shape:
                    yield self._fragment(piece, kind, value)

    def _fragment(self, piece: Piece, kind: str, data: Tensor) -> Fragment:
        return Fragment(piece.name, kind, piece.shape, piece.interval, data)
