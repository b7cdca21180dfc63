"""Nobody to share with: parameters, masters and gradients are whole on every rank, as plain PyTorch has them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.fragments import Block
from deepspeed.ops.moments import MomentKeeper
from deepspeed.zero.parameters.data import plain_data
from deepspeed.zero.parameters.parameter import watch
from deepspeed.zero.placement import AxisOf, Placement
from deepspeed.zero.states.group import Dtypes, Named, ShardGroup, name_of
from deepspeed.zero.states.piece import Piece, as_wide, is_moment

if TYPE_CHECKING:
    from deepspeed.parallel import AxisGroup
    from deepspeed.zero.gradients.reducer import ShardReducer

__all__ = ["WholeGroup", "WholePlanner"]


class WholeGroup(ShardGroup):
    """All parameters of a group of the optimizer, in its order.

    What the optimizer updates has the parameter's shape. Where the dtypes agree it is the parameter itself and nothing
    is copied. Gradients are reduced where autograd leaves them.
    """

    def __init__(self, members: Sequence[Named], placement: Placement, dtypes: Dtypes, options: dict[str, Any]) -> None:
        super().__init__([], placement, dtypes, options)
        self._copied: list[Piece] = []
        """Those whose master is a copy: only they cost anything."""
        self.extend(members)

    @property
    def copies(self) -> bool:
        """See `ShardGroup`."""
        return bool(self._copied)

    @property
    def whole(self) -> bool:
        """See `ShardGroup`."""
        return True

    def extend(self, members: Sequence[Named]) -> None:
        """Parameters that were unfrozen meanwhile join those of their group."""
        for name, param in members:
            same = param.dtype == self.dtypes.master or not param.is_floating_point()
            wide = param if same else nn.Parameter(param.detach().to(self.dtypes.master), requires_grad=True)
            self.names.append(name)
            self.params.append(param)
            self.pieces.append(Piece(name, param, param.shape, (0, param.numel()), param, wide))
        self._copied = [piece for piece in self.pieces if piece.separate]
        for piece in self._copied:
            watch(piece.param)
        self.layout = Block(tuple(param.numel() for param in self.params), 1)

    def take_states(self, optimizer: Optimizer) -> None:
        """Take over what the optimizer knows of parameters that it was used with before."""
        for piece in self._copied:
            if piece.param not in optimizer.state:
                continue
            state = optimizer.state[piece.master] = optimizer.state.pop(piece.param)
            for key, value in state.items() if not isinstance(optimizer, MomentKeeper) else ():
                if is_moment(key, value, piece.shape):
                    state[key] = as_wide(value, piece)

    def adopt_edits(self) -> None:
        """See `ShardGroup`."""
        for piece in self._copied:
            if piece.edited:
                piece.adopt()

    @torch.no_grad()
    def hand_over(self, lines: dict[Hashable, Tensor], *, narrow: bool = False) -> None:
        """Move gradients from the parameters to their masters, in the masters' dtype; see `ShardGroup`."""
        for piece in self._copied:
            grad = piece.param.grad
            if grad is None or (narrow and grad.layout == torch.strided and grad.is_contiguous()):
                continue
            piece.master.grad = grad.to(piece.master.dtype)
            piece.param.grad = None
        for piece in self.pieces:
            grad = piece.master.grad if piece.master.grad is not None else piece.param.grad
            if grad is not None:
                lines[id(piece)] = grad

    @torch.no_grad()
    def take(self, piece: Piece, *, narrow: bool) -> Tensor | None:
        """See `ShardGroup`; a gradient that was added up in the master's dtype is there already."""
        grad, master = piece.param.grad, piece.master
        if grad is not None and piece.separate:
            banked = master.grad is not None
            if narrow and not banked and grad.layout == torch.strided and grad.is_contiguous():
                return grad
            master.grad = master.grad.add_(grad) if banked else grad.to(master.dtype)  # type: ignore[union-attr]
            piece.param.grad = None
        return piece.param.grad if master.grad is None else master.grad

    def use_up(self, piece: Piece) -> None:
        """See `ShardGroup`."""
        piece.master.grad = piece.param.grad = None
        piece.mark()

    def narrow_gradient(self, piece: Piece) -> Tensor | None:
        """See `ShardGroup`."""
        return piece.param.grad if piece.separate else None

    def held(self, place: int, reducer: ShardReducer | None) -> WholeState:
        """See `ShardGroup`."""
        return WholeState(self.pieces[place])

    def gradients(self) -> list[Tensor | None]:
        """See `ShardGroup`."""
        return [p.master.grad if p.param.grad is None else p.param.grad for p in self.pieces]

    @torch.no_grad()
    def round(self) -> None:
        """See `ShardGroup`."""
        if self._copied:
            torch._foreach_copy_([piece.source for piece in self._copied], [piece.master for piece in self._copied])

    def spread(self) -> None:
        """Every rank has all of it already."""
        for piece in self._copied:
            piece.mark()

    def forget(self) -> None:
        """Drop gradients that were not handed over."""
        for piece in self._copied:
            piece.param.grad = None


class WholePlanner:
    """Makes groups for each group of the optimizer; parameters that are unfrozen later join them."""

    def __init__(self, axis_of: AxisOf, dtypes: Dtypes, names: dict[int, str]) -> None:
        """`names` are those of the module's parameters, by id."""
        self._axis_of, self._dtypes, self._names = axis_of, dtypes, names
        self._groups: dict[tuple[int, Placement], WholeGroup] = {}

    def groups(self, options: dict[str, Any], params: list[nn.Parameter]) -> list[WholeGroup]:
        """The groups of these options, one for each placement, with these parameters in them."""
        kinds: dict[Placement, list[Named]] = {}
        for param in params:
            kinds.setdefault(self._axis_of(param), []).append((name_of(param, self._names), param))
        if not params:  # a group without parameters is listed, too, as one of which nothing is special
            kinds[self._axis_of(nn.Parameter(torch.empty(0)))] = []
        return [self._group(options, placement, members) for placement, members in kinds.items()]

    def _group(self, options: dict[str, Any], placement: Placement, members: list[Named]) -> WholeGroup:
        known = self._groups.get((id(options), placement))
        if known is None:
            made = WholeGroup(members, placement, self._dtypes, options)
            return self._groups.setdefault((id(options), placement), made)
        known.extend(members)
        return known

    def waits(self, param: nn.Parameter) -> bool:
        """A frozen parameter gets a copy in another dtype only when it is trained."""
        return param.is_floating_point() and param.dtype != self._dtypes.master


class WholeState:
    """`deepspeed.zero.states.lookup.ParameterState` for a parameter that is whole on this rank."""

    axis: AxisGroup | None = None

    def __init__(self, piece: Piece) -> None:
        self._piece, self._param = piece, piece.param
        self._master = piece.master
        self.master: nn.Parameter | None = piece.master
        self.name = piece.name
        self.shape = piece.shape
        self.interval = piece.interval
        self.chunk = piece.shape.numel()
        self.dtype = piece.master.dtype
        self.device = piece.param.device

    def gradient(self) -> Tensor | None:
        """See `ParameterState`; where gradients are accumulated in the master's dtype they lie there already."""
        grad = self._param.grad if self._param.grad is not None else self._master.grad
        return grad.to_dense() if grad is not None and grad.layout != torch.strided else grad

    def has_gradient(self) -> bool:
        """See `ParameterState`."""
        return self.gradient() is not None

    def put_gradient(self, values: Tensor) -> None:
        """See `ParameterState`."""
        holder = self._param if self._param.grad is not None else self._master
        holder.grad = values.to(holder.dtype).view(self.shape)

    @torch.no_grad()
    def publish(self) -> None:
        """See `ParameterState`."""
        if self._piece.separate:
            plain_data(self._param).copy_(self._master)
