"""`ShardGroup`: the only owner of the memory of a set of parameters that are spread over the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.fragments import FlatLayout
from deepspeed.memory.tier import AT_HOME, Homes
from deepspeed.zero.gradients.bucket import Parcel
from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.parameters.data import reclaim
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.late import Update
from deepspeed.zero.states.lookup import ParameterState
from deepspeed.zero.states.piece import Piece, hand_over

if TYPE_CHECKING:
    from deepspeed.parallel import AxisGroup
    from deepspeed.zero.gradients.reducer import ShardReducer

__all__ = ["Dtypes", "Named", "ShardGroup", "ShardState", "name_of"]

Named = tuple[str, nn.Parameter]


def name_of(param: nn.Parameter, names: dict[int, str]) -> str:
    """What a parameter is called by `names`, those of a module's parameters by id."""
    return names.get(id(param), f"parameter outside the module, shape {tuple(param.shape)}")


@dataclass(frozen=True)
class Dtypes:
    """In what, and where, the parts of a group's state are held."""

    master: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    homes: Homes = AT_HOME
    """And in which tier."""
    kept: bool = True
    """Memory for gradients is kept between steps where there would be much to allocate; else it comes and goes."""


class ShardGroup:
    """Parameters of one dtype, one optimizer group and one placement.

    What is common to all residencies is here: the pieces that the optimizer updates. Where the whole parameters live,
    how gradients are laid out for their owners, and how updates return are the business of the subclasses.
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
        self.homes: list[Tensor] = []
        """The memory that each whole parameter is published in; none where a parameter may lie anywhere."""

    @property
    def copies(self) -> bool:
        """True if the optimizer does not hold the model's own parameters."""
        return True

    @property
    def whole(self) -> bool:
        """True if this rank holds the states of all elements."""
        return False

    @property
    def patient(self) -> bool:
        """True if its parameters can wait for an update until they are used: ranks need not meet for it."""
        return not any(piece.away for piece in self.pieces)

    @property
    def marks(self) -> bool:
        """True if parameters that wait for an update are marked, and whoever uses one looks."""
        return False

    def await_update(self, piece: Piece, turn: Update) -> None:
        """Let whoever needs a parameter that is away wait for its update."""
        raise TypeError(f"{type(self).__name__} publishes at once")

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
        """Drop gradients that were not reduced, and those that the optimizer read where they were."""
        for param in self.params:
            param.grad = None
        for piece in self.pieces:
            if not piece.away:
                piece.gradient = None

    @torch.no_grad()
    def round(self) -> None:
        """Round the updated masters into what this rank publishes; those that are away go by themselves."""
        copied = [piece for piece in self.pieces if piece.separate and not piece.away]
        if copied:
            torch._foreach_copy_([piece.source for piece in copied], [piece.master for piece in copied])

    def bring_back(self) -> None:
        """As `round`, for masters that are away."""
        for piece in self.pieces:
            if piece.away:
                piece.source.copy_(piece.master)

    def spread(self) -> None:
        """Make what every rank has rounded the parameters of all of them."""
        raise TypeError(f"{type(self).__name__} holds no parameters")

    def publish_one(self, place: int) -> None:
        """Bring the master of the parameter at that place into the model, on all ranks."""
        raise TypeError(f"{type(self).__name__} holds no parameters")

    def adopt_edits(self) -> None:
        """Take over parameters that somebody wrote since the last step, instead of undoing that silently."""
        places = enumerate(self.params) if self.homes else ()
        moved = {id(param) for place, param in places if self.reclaim(place)}
        for piece in self.pieces:
            if piece.edited or id(piece.param) in moved:
                piece.adopt()

    def reclaim(self, place: int) -> bool:
        """Bring a parameter whose data was replaced back to the memory that it is published in; True if it was."""
        return bool(self.homes) and reclaim(self.names[place], self.params[place], self.homes[place])

    def take_states(self, optimizer: Optimizer) -> None:
        """Take over what the optimizer knows of parameters that it was used with before."""
        for piece in self.pieces:
            piece.take_state(optimizer)
        for param in self.params:
            optimizer.state.pop(param, None)

    def hand_over(self, lines: dict[Hashable, Tensor], *, narrow: bool = False) -> None:
        """Make the reduced gradients those that the optimizer uses; `lines` collects the memory that they fill.

        Gradients of several groups may have come in one bucket, whose memory is measured once. With `narrow`, the
        optimizer reads those of another dtype where they are: `narrow_gradient` tells it.
        """
        hand_over(self.pieces, lines, narrow=narrow)

    def narrow_gradient(self, piece: Piece) -> Tensor | None:
        """The gradient of a piece that was handed over as it is, in another dtype than the master's."""
        return None if piece.away else piece.gradient

    @torch.no_grad()
    def take(self, piece: Piece, *, narrow: bool) -> Tensor | None:
        """As `hand_over` for one piece that is at home; returns the gradient that the optimizer sees."""
        grad, piece.gradient = piece.gradient, None
        if grad is None:
            return None
        if narrow and grad.dtype != piece.master.dtype:
            piece.gradient = grad.view(piece.master.shape)
            return piece.gradient
        piece.master.grad = grad.to(piece.master.dtype).view(piece.master.shape)
        return piece.master.grad

    def use_up(self, piece: Piece) -> None:
        """The optimizer has used the gradient of a piece that was taken: free it."""
        piece.master.grad = piece.gradient = None

    def held(self, place: int, reducer: ShardReducer | None) -> ParameterState:
        """What this rank holds of the parameter at that place."""
        return ShardState(self, place, reducer)

    def gradients(self) -> list[Tensor | None]:
        """The reduced gradients of this rank's pieces, before they are handed over."""
        return [piece.gradient for piece in self.pieces]


class ShardState:
    """`deepspeed.zero.states.lookup.ParameterState` for a parameter that is spread over ranks."""

    def __init__(self, group: ShardGroup, place: int, reducer: ShardReducer | None) -> None:
        self._group, self._place, self._reducer = group, place, reducer
        self._param = group.params[place]
        self._piece: Piece | None = next((piece for piece in group.pieces if piece.param is self._param), None)
        self.name = group.names[place]
        self.shape = torch.Size(getattr(self._param, "ds_shape", self._param.shape))
        self.axis: AxisGroup | None = group.axis if group.axis.size > 1 else None
        self.interval = group.layout.interval(place, group.axis.rank)
        self.chunk = -(-self.shape.numel() // group.axis.size)
        self.dtype = group.dtypes.master
        self.device = self._param.device
        self.master = None if self._piece is None else self._piece.master

    def gradient(self) -> Tensor | None:
        """See `ParameterState`."""
        return None if self._piece is None else self._piece.gradient

    def has_gradient(self) -> bool:
        """See `ParameterState`."""
        return self._reducer is not None and self._reducer.had_gradient(self._param)

    def put_gradient(self, values: Tensor) -> None:
        """See `ParameterState`."""
        if self._piece is not None:
            self._piece.put_gradient(values, self._group.dtypes.accumulate)
        if self._reducer is not None:
            self._reducer.note_gradient(self._param)

    def publish(self) -> None:
        """See `ParameterState`."""
        self._group.publish_one(self._place)
