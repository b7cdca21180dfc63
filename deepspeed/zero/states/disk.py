"""Tiles whose masters and moments rest on the disk: read into buffers of host memory, updated there, written back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.comm import Pending
from deepspeed.comm.pending import AllOf
from deepspeed.memory.host import host_empty
from deepspeed.ops.aio import FileEngine
from deepspeed.zero.states.arena import Arena
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.tiles import Tile

__all__ = ["MASTER", "DiskStore", "kinds_of"]

MASTER = "master"


class DiskStore:
    """`deepspeed.memory.store.Store` for arenas with a swap file; whatever lives elsewhere stays where it is."""

    def __init__(self, optimizer: Optimizer, engine: FileEngine) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._buffers: list[Tensor] = []
        """Free ones; as many tiles as are on their way at a time have some."""
        self._held: dict[Arena, dict[str, Tensor]] = {}

    def fetch(self, tile: Tile) -> Pending[None]:
        """See `Store`."""
        arena = tile.arena
        if arena is None or arena.swap is None:
            return Pending(None)
        held = {kind: self._buffer(region.tensor) for kind, region in arena.regions.items()}
        reads = [
            self._engine.read(arena.swap.path, buffer, arena.regions[kind].offset) for kind, buffer in held.items()
        ]

        def enter(_: None) -> None:
            self._held[arena] = held
            for kind, buffer in held.items():
                _show(self._optimizer, arena, kind, buffer)

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
                value = _state(self._optimizer, piece, kind)
                if value is not None and value.data_ptr() != part.data_ptr():  # made, or replaced, by the step
                    part.copy_(value.detach().reshape(-1))
            writes.append(self._engine.write(arena.swap.path, buffer, arena.regions[kind].offset))
            _show(self._optimizer, arena, kind, resting)

        def free(_: None) -> None:
            self._buffers += [buffer.view(torch.uint8) for buffer in held.values()]

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
        values = [_state(optimizer, piece, kind) for piece in arena.pieces]
        yield kind, [0 if value is None else value.numel() for value in values], example.dtype


def _state(optimizer: Optimizer, piece: Piece, kind: str) -> Tensor | None:
    if kind == MASTER:
        return piece.master
    found: Any = optimizer.state.get(piece.master, {}).get(kind)
    return found if isinstance(found, Tensor) else None


def _show(optimizer: Optimizer, arena: Arena, kind: str, flat: Tensor) -> None:
    """Let masters, or a kind of state, lie in `flat`, piece after piece."""
    at = 0
    for piece in arena.pieces:
        value = _state(optimizer, piece, kind)
        if value is None:
            continue
        part = flat[at : at + value.numel()].view(value.shape)
        at += value.numel()
        if kind == MASTER:
            piece.master.data = part
        else:
            optimizer.state[piece.master][kind] = part
