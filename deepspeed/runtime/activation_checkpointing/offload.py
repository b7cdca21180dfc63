"""Saved tensors that wait in host memory: they leave while forward goes on and come back before backward needs them.

[Note: turns]
Backward uses what forward saved in the opposite order. What one checkpointed call saves is a turn; each turn knows the
one before it. When backward asks for a tensor of a turn, the rest of that turn and all of the turn before begin to
come back, so that they travel while this turn is computed. Turns and what waits belong to autograd's graph alone:
dropping the graph drops them, and their host buffers are free again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.memory.lane import Direct, Lane, Ticket, lane_for
from deepspeed.runtime.activation_checkpointing.arena import Slot
from deepspeed.runtime.activation_checkpointing.host_pool import HostPool
from deepspeed.runtime.activation_checkpointing.saved import changed_in_place

__all__ = ["CheckpointActivationOffloadStats", "Offload", "OffloadLimits", "Parked", "Turn"]


@dataclass(slots=True)
class CheckpointActivationOffloadStats:
    """What happened to saved tensors."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    """How much of each kind of memory may be held."""

    stash: int = 2
    """Tensors that may stay on the device while they are copied; the next one makes forward wait for the oldest."""
    pool: int | None = None
    """Host buffers kept for later; None: as many as were ever used at once."""
    keep_last: int = 1
    """Newest tensors that do not leave, since backward begins with them."""


class _Where(Enum):
    HERE = "on the device, among the last"
    LEAVING = "on the device, copied to the host"
    AWAY = "in host memory"
    COMING = "copied to the device"


class Turn:
    """The tensors that one call saves."""

    __slots__ = ("__weakref__", "before", "members")

    def __init__(self) -> None:
        self.members: list[weakref.ref[Parked]] = []
        self.before: weakref.ref[Turn] | None = None

    def parked(self) -> list[Parked]:
        """Those that still wait."""
        return [parked for ref in self.members if (parked := ref()) is not None]


class Parked:
    """A 1-D tensor that waits for backward; only `Offload` looks inside."""

    __slots__ = (
        *("__weakref__", "device", "dtype", "numel", "shape", "turn", "version"),
        *("found", "given_back", "slot", "tensor", "ticket", "where"),
    )

    def __init__(self, flat: torch.Tensor, shape: torch.Size, turn: Turn, slot: Slot[int] | None) -> None:
        self.numel, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.shape = shape  # of the saved tensor, to be told
        self.turn = turn
        self.version = self.found = flat._version  # of the saved tensor if `flat` is a view of it
        self.tensor: torch.Tensor | None = flat
        self.slot: Slot[int] | Slot[torch.Tensor] | None = slot
        self.where = _Where.HERE
        self.ticket: Ticket | None = None
        self.given_back = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def look(self) -> None:
        """Notice a change in place of what is still on the device."""
        if self.tensor is not None and self.where is not _Where.COMING:
            self.found = self.tensor._version

    def check(self) -> None:
        """Raise if the values are not those that were given."""
        self.look()
        if self.found != self.version:
            raise changed_in_place(self.shape, self.found, self.version)


class Offload:
    """Takes tensors to the host and back, within limits; one for all calls that share them."""

    def __init__(
        self,
        limits: OffloadLimits = OffloadLimits(),
        *,
        pinned: bool = True,
        streams: bool = True,
        lane: Callable[[torch.device], Lane] = lane_for,
    ) -> None:
        self._limits = limits
        self._pinned = pinned
        self._make_lane: Callable[[torch.device], Lane] = lane if streams else lambda device: Direct()
        self._lanes: dict[torch.device, Lane] = {}
        self._last_turn: weakref.ref[Turn] | None = None
        self._newest: deque[weakref.ref[Parked]] = deque()
        self._leaving: deque[weakref.ref[Parked]] = deque()
        # Held until the copy is done, also if nobody wants them any more: it would write into memory of others.
        self._coming: list[tuple[Ticket, torch.Tensor]] = []
        self.pool = HostPool(limits.pool, self._host_buffer)
        self.stats = CheckpointActivationOffloadStats()

    @property
    def on_device(self) -> int:
        """Tensors of forward whose device memory is held: among the last, or leaving."""
        waiting = [ref() for ref in (*self._newest, *self._leaving)]
        return sum(parked is not None and parked.tensor is not None for parked in waiting)

    def park(self, flat: torch.Tensor, shape: torch.Size, turn: Turn, slot: Slot[int] | None = None) -> Parked:
        """What waits for a tensor of this shape, in `slot` if it is given; it leaves once newer ones have come."""
        if not turn.members:
            turn.before, self._last_turn = self._last_turn, weakref.ref(turn)
        parked = Parked(flat, shape, turn, slot)
        turn.members.append(weakref.ref(parked))
        self._newest.append(weakref.ref(parked))
        while len(self._newest) > self._limits.keep_last:
            oldest = self._newest.popleft()()
            if oldest is not None:
                self._send(oldest)
        self._let_go(self._limits.stash)
        return parked

    def give_back(self, parked: Parked) -> torch.Tensor:
        """The values on their device; a second time they are brought only when they are asked for."""
        parked.check()
        here = parked.where in (_Where.HERE, _Where.LEAVING)
        self._fetch(parked)
        for each in (*parked.turn.parked(), *self._before(parked.turn)):
            if not each.given_back:
                self._fetch(each)
        self._coming = [(ticket, tensor) for ticket, tensor in self._coming if not ticket.done()]
        tensor = parked.tensor
        assert tensor is not None, "a tensor that is here or coming"
        if parked.where is _Where.HERE:
            self.stats.kept_last_tensors += 1
        else:
            self.stats.restored_tensors += 1
            self.stats.restored_bytes += parked.nbytes
        parked.given_back = True
        if not here:
            assert parked.ticket is not None, "a tensor that is coming"
            parked.ticket.join()
            self._coming = [(ticket, held) for ticket, held in self._coming if held is not tensor]
            parked.tensor, parked.ticket, parked.where = None, None, _Where.AWAY
        return tensor

    def drain(self) -> None:
        """Wait for all copies and let go of what only they needed; what waits goes on waiting."""
        for lane in self._lanes.values():
            lane.synchronize()
        self._let_go(0)
        self._coming.clear()
        self.pool.clear()

    def _before(self, turn: Turn) -> list[Parked]:
        before = None if turn.before is None else turn.before()
        return [] if before is None else before.parked()

    def _send(self, parked: Parked) -> None:
        """Begin the copy to the host."""
        parked.look()
        if parked.tensor is None or parked.found != parked.version:
            parked.tensor = None  # changed already: there is nothing left to copy, and backward is told
            return
        if parked.slot is None:
            parked.slot = self.pool.take(parked.numel, parked.dtype)
        parked.ticket = self._lane(parked.device).copy(parked.slot.tensor, parked.tensor)
        parked.where = _Where.LEAVING
        self._leaving.append(weakref.ref(parked))
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += parked.nbytes

    def _let_go(self, most: int) -> None:
        """Free the device memory of what has left; what computes waits for the oldest beyond `most`."""
        leaving = deque(ref for ref in self._leaving if (parked := ref()) is not None and parked.tensor is not None)
        while leaving:
            parked = leaving[0]()
            assert parked is not None, "looked at above"
            assert parked.ticket is not None, "a tensor on its way"
            if len(leaving) > most:
                parked.ticket.join()
            elif not parked.ticket.done():
                break
            parked.look()  # what changed before this moment may have been copied half
            parked.tensor, parked.ticket, parked.where = None, None, _Where.AWAY
            leaving.popleft()
        self._leaving = leaving

    def _fetch(self, parked: Parked) -> None:
        """Begin the copy to the device, unless it is there or has begun."""
        if parked.where is not _Where.AWAY or parked.slot is None:
            return
        # Allocated, and later freed, in the order of the stream that computes.
        parked.tensor = torch.empty(parked.numel, dtype=parked.dtype, device=parked.device)
        parked.ticket = self._lane(parked.device).copy(parked.tensor, parked.slot.tensor)
        parked.where = _Where.COMING
        self._coming.append((parked.ticket, parked.tensor))

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = self._make_lane(device)
        return self._lanes[device]

    def _host_buffer(self, nbytes: int) -> torch.Tensor:
        if self._pinned:
            return get_accelerator().pin_empty(nbytes, dtype=torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8)
