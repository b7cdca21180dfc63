"""Groups: the only owners of the memory of sets of parameters that lie on the same ranks, whole or spread over them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.fragments import ContiguousLayout, FlatLayout, StripedLayout
from deepspeed.memory.tier import ON_DEVICE, StateTiers
from deepspeed.ops.moments import MomentKeeper
from deepspeed.zero.gradients.interfaces import BucketEntry, ReductionOf
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.coded import CodedBlockGather
from deepspeed.zero.parameters.data import plain_access, plain_data, reclaim, show
from deepspeed.zero.parameters.gather import BlockGather, FlatBlocks, GatherFor
from deepspeed.zero.parameters.parameter import ResidentParameter, plain_grad, set_plain_grad, watch
from deepspeed.zero.parameters.shard import Shard, rest_as, shard_of, used_while_empty
from deepspeed.zero.piece import StatePiece, as_wide, hand_over, is_moment
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.late_parameters import PendingUpdate, postpone
from deepspeed.zero.states.parameter_state import ParameterState, WholeState
from deepspeed.zero.states.tiles import move_out

if TYPE_CHECKING:
    from deepspeed.zero.gradients.reducer import GradientReducer

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
    tiers: StateTiers = ON_DEVICE
    """And in which tier."""
    kept: bool = True
    """Memory for gradients is kept between steps where there would be much to allocate; else it comes and goes."""


class ShardGroup:
    """Parameters of one dtype, one optimizer group and one placement.

    What is common to all residencies is here: the pieces that the optimizer updates. Where the whole parameters live,
    how gradients are laid out for their owners, and how updates return are the business of the subclasses.
    """

    layout: FlatLayout
    whole = False
    """True if this rank holds the states of all elements."""
    marks = False
    """True if parameters that wait for an update are marked, and whoever uses one looks."""

    def __init__(self, members: Sequence[Named], placement: Placement, dtypes: Dtypes, options: dict[str, Any]) -> None:
        self.names = [name for name, _ in members]
        self.params = [param for _, param in members]
        self.placement = placement
        self.axis = placement.shard
        self.dtypes = dtypes
        self.options = options
        """The optimizer's own dict of this parameter group."""
        self.pieces: list[StatePiece] = []
        """Those that have elements on this rank."""
        self.published: list[Tensor] = []
        """The memory that each whole parameter is published in; none where a parameter may lie anywhere."""

    @property
    def copies(self) -> bool:
        """True if the optimizer does not hold the model's own parameters."""
        return True

    @property
    def takes_late_updates(self) -> bool:
        """True if its parameters can wait for an update until they are used: ranks need not meet for it."""
        return not any(piece.away for piece in self.pieces)

    def await_update(self, piece: StatePiece, turn: PendingUpdate) -> None:
        """Let whoever needs a parameter that is away wait for its update."""
        raise TypeError(f"{type(self).__name__} publishes at once")

    def entries(self, reduction_of: ReductionOf) -> list[BucketEntry]:
        """The gradients of its parameters, as the way to their owners sees them."""
        raise TypeError(f"{type(self).__name__} lays out no gradients")

    def _entry(
        self,
        place: int,
        reduction_of: ReductionOf,
        take: Callable[[], Tensor | None],
        piece: StatePiece | None,
        **owned: Any,
    ) -> BucketEntry:
        """The gradient of the parameter at that place; `owned` tells which elements who owns."""
        dtypes = self.dtypes
        return BucketEntry(
            self.names[place],
            self.params[place],
            self.layout.numels[place],
            reduction_of(self.placement, self.params[place]),
            dtypes.reduce,
            dtypes.accumulate,
            self.params[place].device,
            take,
            piece,
            **owned,
        )

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
        with plain_access():
            for param in self.params:
                set_plain_grad(param, None)
        for piece in self.pieces:
            if piece.arena is None:
                piece.gradient = None

    @torch.no_grad()
    def round(self) -> None:
        """Round the updated masters into what this rank publishes; those that are away go by themselves."""
        if self._copied:
            torch._foreach_copy_([piece.source for piece in self._copied], [piece.master for piece in self._copied])

    @cached_property
    def _copied(self) -> list[StatePiece]:
        """Those whose masters are copies, where the parameters are."""
        return [piece for piece in self.pieces if piece.separate and not piece.away]

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
        """Take over parameters that were written since the last step, instead of undoing that silently."""
        places = enumerate(self.params) if self.published else ()
        moved = {id(param) for place, param in places if self.reclaim(place)}
        for piece in self.pieces:
            if piece.edited or id(piece.param) in moved:
                piece.adopt()

    def reclaim(self, place: int) -> bool:
        """Bring a parameter whose data was replaced back to the memory that it is published in; True if it was."""
        return bool(self.published) and reclaim(self.names[place], self.params[place], self.published[place])

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

    def narrow_gradient(self, piece: StatePiece) -> Tensor | None:
        """The gradient of a piece that was handed over as it is, in another dtype than the master's."""
        return None if piece.away else piece.gradient

    @torch.no_grad()
    def take(self, piece: StatePiece, *, narrow: bool) -> Tensor | None:
        """As `hand_over` for one piece that is at home; returns the gradient that the optimizer sees."""
        grad, piece.gradient = piece.gradient, None
        if grad is None:
            return None
        if narrow and grad.dtype != piece.master.dtype:
            piece.gradient = grad.view(piece.master.shape)
            return piece.gradient
        piece.master.grad = grad.to(piece.master.dtype).view(piece.master.shape)
        return piece.master.grad

    def use_up(self, piece: StatePiece) -> None:
        """The optimizer has used the gradient of a piece that was taken: free it."""
        piece.master.grad = piece.gradient = None

    def held(self, place: int, reducer: GradientReducer | None) -> ParameterState:
        """What this rank holds of the parameter at that place."""
        piece = next((piece for piece in self.pieces if piece.param is self.params[place]), None)
        return ParameterState(self, place, piece, reducer)

    def gradients(self) -> list[Tensor | None]:
        """The reduced gradients of this rank's pieces, before they are handed over."""
        return [piece.gradient for piece in self.pieces]


class OffloadedGroup(ShardGroup):
    """Whole parameters on every rank; masters, moments and gradients in another tier, for which gradients leave."""

    layout: ContiguousLayout
    whole = marks = takes_late_updates = True

    def __init__(self, members: Sequence[Named], placement: Placement, dtypes: Dtypes, options: dict[str, Any]) -> None:
        super().__init__(members, placement, dtypes, options)
        self.layout = ContiguousLayout(tuple(param.numel() for param in self.params), 1)
        for name, param in members:
            if not param.is_contiguous():  # gradients leave as flat tensors
                param.data = param.data.contiguous()
            home = plain_data(param)
            self.pieces.append(StatePiece(name, param, param.shape, (0, param.numel()), home))
            self.published.append(home)
            watch(name, param)
        move_out(self.pieces, dtypes)

    def await_update(self, piece: StatePiece, turn: PendingUpdate) -> None:
        postpone(piece.param, turn)

    def spread(self) -> None:
        """Every rank has all of it already."""
        for piece in self.pieces:
            piece.mark()

    @torch.no_grad()
    def publish_one(self, place: int) -> None:
        """Bring the master of the parameter at that place into the model."""
        self.pieces[place].source.copy_(self.pieces[place].master)

    def entries(self, reduction_of: ReductionOf) -> list[BucketEntry]:
        """This rank owns everything."""
        return [
            self._entry(place, reduction_of, partial(take_gradient, piece.param), piece, chunk=piece.param.numel())
            for place, piece in enumerate(self.pieces)
        ]


class WholeGroup(ShardGroup):
    """Nothing is shared: parameters, masters and gradients are whole on every rank, as plain PyTorch has them.

    All parameters of a group of the optimizer, in its order.

    What the optimizer updates has the parameter's shape. Where the dtypes agree it is the parameter itself and nothing
    is copied. Gradients are reduced where autograd leaves them.
    """

    whole = True

    def __init__(self, members: Sequence[Named], placement: Placement, dtypes: Dtypes, options: dict[str, Any]) -> None:
        super().__init__([], placement, dtypes, options)
        self.extend(members)

    @property
    def copies(self) -> bool:
        return bool(self._copied)

    def extend(self, members: Sequence[Named]) -> None:
        """Parameters that were unfrozen meanwhile join those of their group."""
        for name, param in members:
            same = param.dtype == self.dtypes.master or not param.is_floating_point()
            wide = param if same else nn.Parameter(param.detach().to(self.dtypes.master), requires_grad=True)
            self.names.append(name)
            self.params.append(param)
            self.pieces.append(StatePiece(name, param, param.shape, (0, param.numel()), param, wide))
        self.__dict__.pop("_copied", None)
        for piece in self._copied:
            watch(piece.name, piece.param)
        self.layout = ContiguousLayout(tuple(param.numel() for param in self.params), 1)

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
    def take(self, piece: StatePiece, *, narrow: bool) -> Tensor | None:
        """See `ShardGroup`; a gradient that was added up in the master's dtype is there already."""
        grad, master = piece.param.grad, piece.master
        if grad is not None and piece.separate:
            banked = master.grad is not None
            if narrow and not banked and grad.layout == torch.strided and grad.is_contiguous():
                return grad
            master.grad = master.grad.add_(grad) if banked else grad.to(master.dtype)  # type: ignore[union-attr]
            piece.param.grad = None
        return piece.param.grad if master.grad is None else master.grad

    def use_up(self, piece: StatePiece) -> None:
        piece.master.grad = piece.param.grad = None
        piece.mark()

    def narrow_gradient(self, piece: StatePiece) -> Tensor | None:
        return piece.param.grad if piece.separate else None

    def held(self, place: int, reducer: GradientReducer | None) -> WholeState:
        return WholeState(self, place)

    def gradients(self) -> list[Tensor | None]:
        return [p.master.grad if p.param.grad is None else p.param.grad for p in self.pieces]

    def spread(self) -> None:
        """Every rank has all of it already."""
        for piece in self._copied:
            piece.mark()

    def forget(self) -> None:
        """Drop gradients that were not handed over."""
        for piece in self._copied:
            piece.param.grad = None


class BlockGroup(ShardGroup):
    """Whole parameters, views of one flat buffer of which each rank owns a block; nothing is rearranged to travel."""

    layout: ContiguousLayout

    def __init__(
        self,
        members: Sequence[Named],
        placement: Placement,
        dtypes: Dtypes,
        options: dict[str, Any],
        *,
        gather: BlockGather | CodedBlockGather,
        aligned: bool = False,
    ) -> None:
        super().__init__(members, placement, dtypes, options)
        axis, first = self.axis, self.params[0]
        gap = max(16 // first.element_size(), 1) if aligned else 1
        self.layout = ContiguousLayout(tuple(param.numel() for param in self.params), axis.size, gap=gap)
        self._whole = self._flatten(first)
        shard = self.layout.shard_numel
        self._shard = self._whole[axis.rank * shard : (axis.rank + 1) * shard]
        label = f"updated parameters {self.names[0]} … {self.names[-1]}"
        self._gather, self._blocks = gather, FlatBlocks(label, axis, self._whole, self._shard)
        self._make_pieces()

    def _flatten(self, first: nn.Parameter) -> Tensor:
        """Move the parameters into one buffer; they stay the same objects."""
        whole = torch.zeros(self.layout.padded, dtype=first.dtype, device=first.device)
        for name, param, start in zip(self.names, self.params, self.layout.starts, strict=True):
            home = whole[start : start + param.numel()].view(param.shape)
            home.copy_(param.detach())
            show(param, home)
            watch(name, param, ResidentParameter)
            self.published.append(home)
        return whole

    def _make_pieces(self) -> None:
        rank, dtype = self.axis.rank, self.dtypes.master
        # One wide copy of the whole shard; the masters are views of it, so that publishing is one copy too.
        self._master: Tensor | None = None
        if not self.dtypes.tiers.away:
            # What comes back as codes is less than the master.
            self._master = self._shard.to(dtype, copy=not self._gather.exact)
        for place in self.layout.members(rank):
            start, stop = self.layout.interval(place, rank)
            if start == stop:
                continue
            at = self.layout.position(place, rank)
            param = self.params[place]
            piece = StatePiece(
                self.names[place], param, param.shape, (start, stop), self._shard[at : at + stop - start]
            )
            if self._master is not None:
                piece.master = nn.Parameter(self._master[at : at + stop - start], requires_grad=True)
            self.pieces.append(piece)
        if self._master is None:
            move_out(self.pieces, self.dtypes)

    def round(self) -> None:
        """See `ShardGroup`; where all masters lie side by side that is one copy."""
        if self._master is None:
            super().round()
        elif self._master is not self._shard:
            with torch.no_grad():
                self._shard.copy_(self._master)

    @torch.no_grad()
    def spread(self) -> None:
        """Gather the blocks of all ranks."""
        self._gather.start([self._blocks], GatherFor.STEP)
        assert self._blocks.pending is not None, "just begun"
        self._blocks.pending.wait()
        for piece in self.pieces:
            piece.mark()

    @torch.no_grad()
    def publish_one(self, place: int) -> None:
        """Bring the master of the parameter at that place into the model."""
        start, numel = self.layout.starts[place], self.layout.numels[place]
        values = torch.zeros(numel, dtype=self._whole.dtype, device=self._whole.device)
        for piece in self.pieces:
            if piece.param is self.params[place]:
                values[piece.interval[0] : piece.interval[1]].copy_(piece.master)
        with comm.labelled(f"updated parameter {self.names[place]}"):
            comm.all_reduce(values, group=self.axis.group)
        self._whole[start : start + numel].copy_(values)

    def entries(self, reduction_of: ReductionOf) -> list[BucketEntry]:
        """A parameter lies on the rank, or the few neighbours, whose blocks it falls into."""
        piece_of = {id(piece.param): piece for piece in self.pieces}
        return [
            self._entry(
                place,
                reduction_of,
                partial(take_gradient, param),
                piece_of.get(id(param)),
                owners=self.layout.holders(place),
                interval=partial(self.layout.interval, place),
            )
            for place, param in enumerate(self.params)
        ]


class StripedGroup(ShardGroup):
    """Parameters of which each is cut by itself, and whole only while it is used."""

    layout: StripedLayout
    takes_late_updates = True
    """A parameter that is gathered waits for its chunk."""

    def __init__(
        self,
        members: Sequence[Named],
        placement: Placement,
        dtypes: Dtypes,
        options: dict[str, Any],
        *,
        arrived: Callable[[Shard], None] | None,
    ) -> None:
        """`arrived` is called with every gradient that is taken."""
        super().__init__(members, placement, dtypes, options)
        self._arrived = arrived
        self.shards = [_need(name, shard_of(param)) for name, param in members]
        self.layout = StripedLayout(tuple(shard.numel for shard in self.shards), self.axis.size)
        self._held: list[tuple[Shard, StatePiece | None]] = []
        for shard, name in zip(self.shards, self.names, strict=True):
            piece = None
            rest_as(shard, None)  # it may have been frozen before
            if shard.local.numel():
                piece = StatePiece(name, shard.param, shard.shape, shard.interval, shard.local)
                piece.version = shard.edits, 0
                self.pieces.append(piece)
            self._held.append((shard, piece))
        lasting = {id(shard.param) for shard in self.shards if shard.persistent}
        # The states of what stays whole on the device stay there, too: it is small, and all ranks meet for it.
        move_out([piece for piece in self.pieces if id(piece.param) in lasting], replace(dtypes, tiers=ON_DEVICE))
        move_out([piece for piece in self.pieces if id(piece.param) not in lasting], dtypes)

    def adopt_edits(self) -> None:
        """Take over parameters that were written since the last step, instead of undoing that silently."""
        with plain_access():
            for shard, piece in self._held:
                if shard.persistent and shard.edited:
                    shard.store()
                if piece is not None and shard.edits != piece.version[0]:
                    piece.adopt()
                    piece.version = shard.edits, 0

    def await_update(self, piece: StatePiece, turn: PendingUpdate) -> None:
        shard = _need(piece.name, shard_of(piece.param))
        shard.late = turn

    @torch.no_grad()
    def spread(self) -> None:
        """Parameters that stay whole are gathered again; the others when they are used."""
        for shard in self.shards:
            if shard.near is not None:
                shard.near.outdate()
        lasting = [shard for shard in self.shards if shard.persistent]
        if lasting:
            fetch.gather(lasting, GatherFor.STEP)

    @torch.no_grad()
    def publish_one(self, place: int) -> None:
        """Bring the master of the parameter at that place into the model; one that is whole now is gathered again."""
        shard, piece = self._held[place]
        if piece is not None and piece.separate:
            piece.source.copy_(piece.master)
        if shard.near is not None:
            shard.near.outdate()
        if shard.whole:
            fetch.gather([shard], GatherFor.STEP)

    def whole_gradients(self) -> Iterator[Tensor]:
        """Gradients that were not reduced yet."""
        yield from super().whole_gradients()
        for shard in self.shards:
            if shard.gradient is not None:
                yield shard.gradient

    def on_arrival(self, param: nn.Parameter) -> Callable[[], None] | None:
        """Take the gradient from a parameter that will not stay whole."""
        shard = _need("", shard_of(param))
        if shard.persistent and self._arrived is None:
            return None
        return partial(_stash, shard, self._arrived)

    def forget(self) -> None:
        """Also drop gradients that wait for the reduction apart from their parameters."""
        super().forget()
        for shard in self.shards:
            shard.gradient = None

    def entries(self, reduction_of: ReductionOf) -> list[BucketEntry]:
        """Every rank owns its chunk of every parameter."""
        return [
            self._entry(
                place,
                reduction_of,
                partial(_take, shard),
                piece,
                chunk=shard.chunk,
                rows=shard.shape[0] if shard.shape else 0,
            )
            for place, (shard, piece) in enumerate(self._held)
        ]


def _need(name: str, shard: Shard | None) -> Shard:
    if shard is None:
        raise TypeError(f"parameter {name!r} is not sharded")
    return shard


def _stash(shard: Shard, arrived: Callable[[Shard], None] | None) -> None:
    with plain_access():
        if not shard.persistent:
            shard.gradient = _take(shard)
        if arrived is not None:
            arrived(shard)


def _take(shard: Shard) -> Tensor | None:
    """The whole gradient of a parameter, wherever it waits; it is forgotten there."""
    waiting, shard.gradient = shard.gradient, None
    param = shard.param
    grad: Tensor | None = plain_grad(param)
    if grad is None:
        return waiting
    set_plain_grad(param, None)
    if grad.numel() != shard.numel:
        raise UsageError(used_while_empty(shard.name))
    return grad if waiting is None else waiting.add_(grad)


def take_gradient(param: nn.Parameter) -> Tensor | None:
    """The gradient that autograd left on the parameter, which forgets it."""
    grad: Tensor | None = plain_grad(param)
    set_plain_grad(param, None)
    return grad
