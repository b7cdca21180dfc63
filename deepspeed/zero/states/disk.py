"""Tiles whose masters and moments rest on the disk: read into buffers of host memory, updated there, written back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.comm import Pending
from deepspeed.comm.pending import AllOf
from deepspeed.memory.host import host_empty
from deepspeed.ops.aio import FileEngine
from deepspeed.zero.states.arena import MASTER, Arena, state_of
from deepspeed.zero.states.tiles import Tile

__all__ = ["DiskStore", "kinds_of"]


class DiskStore:
    """`deepspeed.memory.store.Store` for arenas with a swap file; whatever lives elsewhere stays where it is."""

    def __init__(self, optimizer: Optimizer, engine: FileEngine, buffers: int) -> None:
        """At most `buffers` of host memory are kept from one tile to the next, or as many as one tile needs."""
        self._optimizer = optimizer
        self._engine = engine
        self._most = buffers
        self._buffers: list[Tensor] = []
        """Free ones; as many tiles as are on their way at a time have some."""
        self._held: dict[Arena, dict[str, Tensor]] = {}

    def fetch(self, tile: Tile) -> Pending[None]:
        """See `Store`."""
        arena = tile.arena
        if arena is None or arena.swap is None:
            return Pending(None)
        swap, held = arena.swap, {kind: self._buffer(room) for kind, room in arena.rooms.items()}
        reads = [self._engine.read(swap.path, held[kind], swap.offset_of(room)) for kind, room in arena.rooms.items()]

        def enter(_: None) -> None:
            self._held[arena] = held
            for kind, buffer in held.items():
                arena.show(self._optimizer, kind, buffer)

        return Pending(None, AllOf(reads), enter)

    @torch.no_grad()
    def keep(self, tile: Tile) -> Pending[None]:
        """See `Store`; kinds of state that the step made get their place on the disk."""
        arena = tile.arena
        if arena is None or arena.swap is None:
            return Pending(None)
        held, writes = self._held.pop(arena), []
        for kind, sizes, dtype in kinds_of(self._optimizer, arena):
            resting = arena.room(kind, dtype, sum(sizes))
            buffer = held.get(kind)
            if buffer is None or (buffer.numel(), buffer.dtype) != (resting.numel(), dtype):
                buffer = held[kind] = self._buffer(resting)
            for piece, part in zip(arena.pieces, buffer.split(sizes), strict=True):
                value = state_of(self._optimizer, piece, kind)
                if value is not None and value.data_ptr() != part.data_ptr():  # made, or replaced, by the step
                    part.copy_(value.detach().reshape(-1))
            writes.append(self._engine.write(arena.swap.path, buffer, arena.swap.offset_of(resting)))
            arena.show(self._optimizer, kind, resting)

        def free(_: None) -> None:
            room = max(self._most, len(held)) - len(self._buffers)
            self._buffers += [buffer.view(torch.uint8) for buffer in held.values()][: max(room, 0)]

        return Pending(None, AllOf(writes), free)

    def close(self) -> None:
        """Finish what is on its way."""
        self._engine.close()
        self._buffers.clear()

    def _buffer(self, like: Tensor) -> Tensor:
        """Host memory for as many elements; pages of it, so that the disk writes into it without a copy."""
        for place, free in enumerate(self._buffers):
            if free.numel() >= like.nbytes:
                return self._buffers.pop(place)[: like.nbytes].view(like.dtype)
        return host_empty(like.numel(), like.dtype, pinned=False)


def kinds_of(optimizer: Optimizer, arena: Arena) -> Iterator[tuple[str, list[int], torch.dtype]]:
    """(kind, elements of each piece, dtype) of everything that an arena has on the disk: masters and states."""
    first: dict[str, Tensor] = {}
    for piece in arena.pieces:
        for kind, value in optimizer.state.get(piece.master, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                first.setdefault(kind, value)
    yield MASTER, arena.sizes, arena.pieces[0].master.dtype
    for kind, example in first.items():
        values = [state_of(optimizer, piece, kind) for piece in arena.pieces]
        yield kind, [0 if value is None else value.numel() for value in values], example.dtype
