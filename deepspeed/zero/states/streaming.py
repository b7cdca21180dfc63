"""Tiles whose states live in host memory and are updated by the device: they come, and go back, over the bus.

The bus and the memory of the host have room while the host updates other tiles, so that both together are faster than
either. Two tiles are on their way at a time. Where the device has memory to spare, a few others stay there as well:
their gradients do, too, and what became of them goes to the host when somebody asks for it. These are the tiles that
the next forward needs first, so that it begins at once and follows the host through the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.zero.states.arena import Arena
from deepspeed.zero.states.turn import Turn

__all__ = ["Streamer", "can_stream"]

_SLOTS = 2
_SPARE = 0.10  # of the device's memory that stays free
_CACHE = 0.05  # of the device's memory for tiles that stay
_GRADIENT = "gradient"


def can_stream(turns: Sequence[Turn], optimizer: Optimizer, device: torch.device) -> int | None:
    """How many tiles may stay on the device; None if the device cannot update these.

    Every state has to lie in an arena, wide enough to be updated where torch's kernels run.
    """
    if device.type != "cuda" or getattr(optimizer, "moment_bits", None) == 8:
        return None
    arenas = [turn.tile.arena for turn in turns]
    if any(arena is None or arena.swap is not None or not _complete(arena, optimizer) for arena in arenas):
        return None
    size = max((_size(arena) for arena in arenas if arena is not None), default=1)
    total = torch.cuda.get_device_properties(device).total_memory
    free = int((1 - _SPARE) * total) - torch.cuda.max_memory_reserved(device) - _SLOTS * size
    return None if free < 0 else int(min(free, _CACHE * total)) // size


def _size(arena: Arena) -> int:
    return sum(room.nbytes for room in arena.rooms.values()) + arena.gradients.nbytes


def _complete(arena: Arena, optimizer: Optimizer) -> bool:
    """True if all states of an arena's pieces lie in its rooms."""
    for piece in arena.pieces:
        state = optimizer.state.get(piece.master)
        if not state:
            return False
        tensors = {kind: value for kind, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
        if set(tensors) != set(arena.rooms) - {"master"}:
            return False
        if any(not arena.lies_in(value, kind) for kind, value in tensors.items()):
            return False
    return True


@dataclass
class _Slot:
    """Memory of the device for one tile."""

    memory: dict[str, Tensor] = field(default_factory=dict)
    done: Any = None
    """The event behind the last update in it."""
    kept: Any = None
    """The event behind the copy of what was in it to the host."""

    def like(self, kind: str, host: Tensor, device: torch.device) -> Tensor:
        found = self.memory.get(kind)
        if found is None or found.numel() < host.numel() or found.dtype != host.dtype:
            found = self.memory[kind] = torch.empty(host.numel(), dtype=host.dtype, device=device)
        return found[: host.numel()]


class Streamer:
    """Updates tiles on the device."""

    def __init__(self, device: torch.device, stay: int) -> None:
        """`stay` tiles have memory of the device for good."""
        self._device = device
        self._slots = [_Slot() for _ in range(_SLOTS)]
        self._stay = stay
        self._staying: dict[Arena, _Slot] = {}
        accelerator = get_accelerator()
        self._comes, self._works, self._goes = (accelerator.Stream() for _ in range(3))

    def welcome(self, turns: Sequence[Turn]) -> tuple[list[Turn], list[Turn]]:
        """Let the first tiles stay, as long as there is room; returns the turns of those that do, and the others."""
        staying: list[Turn] = []
        others: list[Turn] = []
        for turn in turns:
            arena = turn.tile.arena
            assert arena is not None, "what streams has an arena"
            if arena not in self._staying and len(self._staying) < self._stay:
                self._staying[arena] = _Slot()
                arena.claim()
                arena.hold_gradients(self._device)
            (staying if arena in self._staying else others).append(turn)
        return staying, others

    def leave(self) -> None:
        """The host updates everything from now on."""
        for arena in self._staying:
            arena.claim()
            arena.hold_gradients(torch.device("cpu"))
        self._staying.clear()

    def begin(self) -> None:
        """What is queued now may still use the parameters that are about to be written."""
        for stream in (self._works, self._comes):
            stream.wait_stream(get_accelerator().current_stream())

    @torch.no_grad()
    def carry(self, sources: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
        """Queue weights that the host has updated to where they are used; returns the event behind that.

        They take their turn among the tiles that come: on a stream of their own they would wait for the bus until no
        tile comes any more, and the host for a buffer that is free.
        """
        with get_accelerator().stream(self._comes):
            torch._foreach_copy_(list(sources), list(values), non_blocking=True)
            return _event(self._comes)

    def ready(self) -> None:
        """Wait until another tile may be taken: the host must not take more than the bus can carry."""
        if self._slots[0].kept is not None:
            self._slots[0].kept.synchronize()

    @torch.no_grad()
    def step(self, turn: Turn, optimizer: Optimizer, factor: float) -> None:
        """Queue the update of a tile; the turn tells when its weights are there and when its states are back."""
        arena = turn.tile.arena
        assert arena is not None, "what streams has an arena"
        slot, known = self._slot(arena)
        accelerator = get_accelerator()
        host = arena.rooms if arena in self._staying else {**arena.rooms, _GRADIENT: arena.gradients}
        with accelerator.stream(self._comes):
            here = {kind: slot.like(kind, flat, self._device) for kind, flat in host.items()}
            if slot.done is not None:
                self._comes.wait_event(slot.done)  # the last update in this slot; its way back was waited for
            for kind, flat in host.items():
                if not known:
                    here[kind].copy_(flat, non_blocking=True)
        with accelerator.stream(self._works):
            self._works.wait_stream(self._comes)
            self._update(turn, arena, {_GRADIENT: arena.gradients, **here}, optimizer, factor)
            turn.sent = slot.done = _event(self._works)
        if arena in self._staying:
            turn.kept = turn.sent  # the gradients were read
            arena.mirrored, arena.ahead = True, partial(self._go_home, arena, here, wait=True)
        else:
            turn.kept = slot.kept = self._go_home(arena, here)

    @torch.no_grad()
    def _go_home(self, arena: Arena, here: dict[str, Tensor], *, wait: bool = False) -> Any:
        """Queue the states of a tile to the host; returns the event behind that."""
        with get_accelerator().stream(self._goes):
            self._goes.wait_stream(self._works)
            for kind, flat in arena.rooms.items():
                flat.copy_(here[kind], non_blocking=True)
            event = _event(self._goes)
        if wait:
            event.synchronize()
        return event

    def _slot(self, arena: Arena) -> tuple[_Slot, bool]:
        """Memory for a tile, and whether its states are there already."""
        if arena in self._staying:
            return self._staying[arena], arena.mirrored
        slot = self._slots.pop(0)
        self._slots.append(slot)
        return slot, False

    def _update(self, turn: Turn, arena: Arena, here: dict[str, Tensor], optimizer: Optimizer, factor: float) -> None:
        gradient = here[_GRADIENT].to(here["master"].dtype)
        if factor != 1.0:
            gradient = gradient * factor  # not in place: it may be where gradients are held
        chosen = {id(piece) for piece in turn.pieces}
        for kind in arena.rooms:
            arena.show(optimizer, kind, here[kind])
        for piece, grad in zip(arena.pieces, arena.split(gradient), strict=True):
            piece.master.grad = grad if id(piece) in chosen else None
        optimizer.step()
        sources, masters = [piece.source for piece in turn.pieces], [piece.master.detach() for piece in turn.pieces]
        if sources and sources[0].device != masters[0].device:  # rounded here, so that half as much goes
            masters = [master.to(source.dtype) for source, master in zip(sources, masters, strict=True)]
        torch._foreach_copy_(sources, masters, non_blocking=True)
        for piece in arena.pieces:
            piece.master.grad = None
        for kind, flat in arena.rooms.items():
            arena.show(optimizer, kind, flat)


def _event(stream: Any) -> Any:
    event = get_accelerator().Event()
    event.record(stream)
    return event
