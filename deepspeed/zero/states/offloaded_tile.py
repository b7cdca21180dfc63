"""`OffloadedTile`: pieces that left the device together; their masters and gradients are contiguous, one tile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.memory.host import host_empty
from deepspeed.memory.tier import SwapFile, Tier
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.states.late_parameters import PendingUpdate

if TYPE_CHECKING:
    from deepspeed.zero.states.groups import Dtypes

T = TypeVar("T")


def runs(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Items in their order, in runs of at most `limit` elements, or of one item that is larger; 0 is no limit."""
    run: list[T] = []
    filled = 0
    for item in items:
        taken = size(item)
        if run and limit and filled + taken > limit:
            yield run
            run, filled = [], 0
        run.append(item)
        filled += taken
    if run:
        yield run


MASTER = "master"
_NARROW = (torch.bfloat16, torch.float16)


class OffloadedTile:
    """Neighbouring pieces; in the order of the pieces, each kind of state of theirs is one flat tensor."""

    @torch.no_grad()
    def __init__(self, pieces: Sequence[StatePiece], dtypes: Dtypes, swap: SwapFile | None = None) -> None:
        self.pieces = list(pieces)
        self.sizes = [piece.source.numel() for piece in pieces]
        self.numel = sum(self.sizes)
        self.turn: PendingUpdate | None = None
        """The last step's update, of which nobody knows yet whether it is done."""
        self.mirrored = False
        """What lies in the rooms lies on the device, too, there perhaps newer: see `bring_home` and `claim`."""
        self.ahead: Callable[[], None] | None = None
        """Brings what the device made of the states into the rooms; None: it is there."""
        self.swap = swap
        self._pinned = dtypes.tiers.pinned
        self.rooms: dict[str, Tensor] = {}
        """Each kind of state where it rests: MASTER and the optimizer's keys."""
        # Where nothing is added up, gradients lie as they travelled: nothing is lost, and half as much moves.
        held = dtypes.reduce if dtypes.tiers.once and dtypes.reduce in _NARROW else dtypes.accumulate
        self.gradients = host_empty(self.numel, held, pinned=dtypes.tiers.pinned).zero_()
        master = self.room(MASTER, dtypes.master, self.numel)
        for piece, wide, home in zip(pieces, self.split(master), self.gradients.split(self.sizes), strict=True):
            wide.copy_(piece.source.detach())
            piece.leave(self, wide, home)

    @torch.no_grad()
    def widen(self, dtype: torch.dtype) -> None:
        """Hold gradients in `dtype` from now on, since some are added up all the same."""
        if self.gradients.dtype == dtype:
            return
        if self.pieces[0].param.device.type != "cpu":
            get_accelerator().synchronize()  # some may be on their way
        self.hold_gradients(self.gradients.device, dtype)

    @torch.no_grad()
    def hold_gradients(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Let gradients lie there from now on; those that are held are copied, as one."""
        dtype = dtype or self.gradients.dtype
        if device.type == "cpu":
            memory = host_empty(self.numel, dtype, pinned=self._pinned)
        else:
            memory = torch.empty(self.numel, dtype=dtype, device=device)
        self.gradients = memory.copy_(self.gradients)
        for piece, home in zip(self.pieces, memory.split(self.sizes), strict=True):
            piece.home = home
            if piece.gradient is not None:
                piece.gradient = home

    def settle(self) -> None:
        """The memory of masters, moments and gradients is not in use any more."""
        if self.turn is not None:
            turn, self.turn = self.turn, None
            turn.settle()

    def bring_home(self) -> None:
        """The rooms hold the states as the last step made them: to be called before they are read."""
        if self.ahead is not None:
            bring, self.ahead = self.ahead, None
            bring()

    def claim(self) -> None:
        """The rooms are about to be written: what the device has of them is no use any more."""
        self.bring_home()
        self.mirrored = False

    def split(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor of the arena as those of its pieces, each of the shape of its master."""
        parts = flat.split(self.sizes)
        return [part.view(piece.source.shape) for piece, part in zip(self.pieces, parts, strict=True)]

    def room(self, kind: str, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory of the tier for a kind of state; the same as long as its dtype and its size are."""
        known = self.rooms.get(kind)
        if known is None or (known.dtype, known.numel()) != (dtype, numel):
            if self.swap is not None:
                known = self.swap.take(numel, dtype)
            else:
                known = host_empty(numel, dtype, pinned=self._pinned).zero_()
            self.rooms[kind] = known
        return known

    def lies_in(self, value: Tensor, kind: str) -> bool:
        """True if a state tensor lies in the room of its kind."""
        room = self.rooms[kind]
        return room.data_ptr() <= value.data_ptr() < room.data_ptr() + room.nbytes

    def show(self, optimizer: Optimizer, kind: str, flat: Tensor) -> None:
        """Let masters, or a kind of state, lie in `flat`, piece after piece."""
        at = 0
        for piece in self.pieces:
            value = state_of(optimizer, piece, kind)
            if value is None:
                continue
            part = flat[at : at + value.numel()].view(value.shape)
            at += value.numel()
            if kind == MASTER:
                piece.master.data = part
            else:
                optimizer.state[piece.master][kind] = part


def state_of(optimizer: Optimizer, piece: StatePiece, kind: str) -> Tensor | None:
    """The master of a piece, or what the optimizer keeps of it under that key."""
    if kind == MASTER:
        return piece.master
    found: Any = optimizer.state.get(piece.master, {}).get(kind)
    return found if isinstance(found, Tensor) else None


def move_out(pieces: Sequence[StatePiece], dtypes: Dtypes) -> None:
    """Give pieces their memory off the device, and those that stay their masters and gradients on it."""
    places = dtypes.tiers.rooms.place([piece.source.numel() for piece in pieces])
    by_tier: dict[Tier, list[StatePiece]] = {}
    for piece, tier in zip(pieces, places, strict=True):
        by_tier.setdefault(tier, []).append(piece)
    staying = by_tier.pop(Tier.DEVICE, [])
    for piece in staying:
        piece.widen(dtypes.master, piece.param.device)
    if staying and dtypes.kept:
        give_gradient_memory(staying, dtypes.accumulate)
    for tier, leaving in by_tier.items():
        for run in runs(leaving, lambda piece: piece.source.numel(), dtypes.tiers.tile):
            OffloadedTile(run, dtypes, dtypes.tiers.swap if tier is Tier.DISK else None)


def give_gradient_memory(pieces: Sequence[StatePiece], dtype: torch.dtype) -> None:
    """Let gradients lie side by side on the device for good: nothing is allocated while backward runs."""
    sizes = [piece.source.numel() for piece in pieces]
    homes = torch.zeros(sum(sizes), dtype=dtype, device=pieces[0].param.device).split(sizes)
    for piece, home in zip(pieces, homes, strict=True):
        piece.home = home
