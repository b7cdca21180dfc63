"""Tiles: the parts in which a step is taken, how they follow each other, and the update of one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.memory.host import host_empty
from deepspeed.memory.tier import SwapFile, Tier
from deepspeed.ops.onebit.base import OneBitOptimizer
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.states.late_parameters import PendingUpdate

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema
    from deepspeed.zero.states.groups import Dtypes

# What an engine sets on an optimizer of this library, and a copy of it does not have by itself.
_SHARED = ("new_state", "mixed")


@dataclass(frozen=True)
class Tile:
    """Pieces that are updated together."""

    params: list[list[nn.Parameter]]
    """What the optimizer updates, by its parameter groups."""
    pieces: list[StatePiece]
    """Those that live away from the device, in the order of the parameters; none in a tile on the device."""
    arena: OffloadedTile | None = None
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
    # pieces of different ranks meet in its step
    mixes = getattr(optimizer, "whole", None) is not None or isinstance(optimizer, OneBitOptimizer)
    return known and not isinstance(optimizer, LBFGS) and not mixes


def tile(optimizer: Optimizer, away: Mapping[int, StatePiece], limit: int) -> list[Tile]:
    """Tiles of about `limit` elements each on the device, 0 for all at once; then one for each arena away from it.

    `away` are the pieces that live in another tier, by the id of their masters.
    """
    count = len(optimizer.param_groups)
    masters = [options["params"] for options in optimizer.param_groups]
    if not away and (not limit or sum(map(Tensor.numel, chain.from_iterable(masters))) <= limit):
        return [Tile(masters, [])]
    rows = [
        (place, master, away.get(id(master)))
        for place, options in enumerate(optimizer.param_groups)
        for master in options["params"]
    ]
    if not tiles_well(optimizer):
        return [_tile(rows, count)]
    arenas: dict[OffloadedTile, list[_Row]] = {}
    for row in rows:
        if row[2] is not None and row[2].arena is not None:
            arenas.setdefault(row[2].arena, []).append(row)
    here = [row for row in rows if row[2] is None]
    tiles = [_tile(run, count) for run in runs(here, lambda row: row[1].numel(), limit)]
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


_Row = tuple[int, nn.Parameter, StatePiece | None]
"""The number of the parameter group, a master, its piece if that lives away from the device."""


def _tile(rows: Sequence[_Row], count: int) -> Tile:
    params: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for place, master, _ in rows:
        params[place].append(master)
    return Tile(params, [piece for _, _, piece in rows if piece is not None])


class TileUpdate:
    """A tile with the gradients of a step. `wait` returns when its weights are, or are queued, where they are used."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        self.pieces = [piece for piece in tile.pieces if piece.gradient is not None]
        self.grads: list[Tensor] = []
        self.take_gradients()
        self.factor: float | None = None
        """By which the host multiplies the gradients; None: by that of the step."""
        self.before: Callable[[], None] | None = None
        """What the host does first."""
        self.only_before = False
        """And nothing else: the weights stay."""
        self.after: Callable[[Sequence[Tensor]], None] | None = None
        """What is done with the new weights before they return to the device."""
        self._done = Event()
        self._error: BaseException | None = None
        self.sent: Any = None
        """The device's event behind the copy of the new weights."""
        self.kept: Any = None
        """The device's event behind the copy of the states, if they were on the device."""

    def take_gradients(self) -> None:
        """Those of this moment are the step's."""
        self.grads = [piece.gradient for piece in self.pieces if piece.gradient is not None]

    def finish(self, error: BaseException | None = None) -> None:
        """Let those who wait go on, or fail."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """See the class."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self.sent is not None:
            self.sent.wait()

    def settle(self) -> None:
        """As `wait`; and the memory of states and gradients is the host's again."""
        self.wait()
        if self.kept is not None:
            self.kept.synchronize()


@dataclass(frozen=True)
class StepTiling:
    """How the tiles of a step follow each other."""

    tile: int = 0
    """Elements that are updated at a time on the device; 0 means all."""
    ahead: int = 1
    """Tiles that are read from the disk while one is updated."""
    behind: int = 1
    """Tiles that are written to the disk meanwhile."""
    pinned: bool = True
    """Buffers through which weights return to the device are page-locked."""
    late: bool = False
    """The caller goes on while states in other tiers are updated."""
    cores: float = 1.0
    """Share of the threads that update them (`cpuadam_cores_perc` of `super_offload`)."""

    @classmethod
    def of(cls, schema: Schema, tile: int | None, *, pinned: bool, late: bool) -> StepTiling:
        """As the config says; tiles of `sub_group_size` elements, if `tile` is None."""
        zero, offload = schema.zero_optimization, schema.zero_optimization.offload_optimizer
        given = set() if offload is None else offload.model_fields_set
        ahead = offload is None or "pipeline_read" not in given or offload.pipeline_read
        behind = offload is None or "pipeline_write" not in given or offload.pipeline_write
        made = cls(int(zero.sub_group_size) if tile is None else tile, int(ahead), int(behind), pinned, late)
        if offload is not None and offload.super_offload:
            return replace(made, late=True, cores=float(offload.cpuadam_cores_perc))
        if zero.zenflow is not None:
            cores = 1.0 - float(zero.zenflow.pt_reserved_cores_perc)
            return replace(made, late=late or zero.zenflow.overlap_step, cores=cores)
        return made


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
        """The last step's update, of which it is not known yet whether it is done."""
        self.mirrored = False
        """What lies in the rooms lies on the device, too, there perhaps newer: see `bring_back` and `claim`."""
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

    def bring_back(self) -> None:
        """The rooms hold the states as the last step made them: to be called before they are read."""
        if self.ahead is not None:
            bring, self.ahead = self.ahead, None
            bring()

    def claim(self) -> None:
        """The rooms are about to be written: what the device has of them is no use any more."""
        self.bring_back()
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
