"""Steps of tiles in host memory: the host updates them, and new weights return while it works on the next tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.memory.beside import Beside
from deepspeed.memory.host import host_empty
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.host_step import HostStep
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.multi_tensor import scale_
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.tiles import Tile

__all__ = ["Afar", "in_one_pass"]

_ALIGNMENT = 64  # bytes; where the weights of a piece begin in a buffer


def in_one_pass(optimizer: Optimizer) -> bool:
    """True for optimizers that unscale, clip, update and round in one pass over host memory."""
    return isinstance(optimizer, (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad))


class Afar:
    """Takes the steps of tiles that live away from the device."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: list[Tensor] = []
        self._events: list[Any] = []
        """Behind the copy out of each buffer."""
        self._beside: Beside | None = None

    @torch.no_grad()
    def step(self, tile: Tile, optimizer: Optimizer, factor: float) -> None:
        """Update a tile with its gradients times `factor`; its new weights are on their way to the device then."""
        pieces = [piece for piece in tile.pieces if piece.gradient is not None]
        outs = self._outs(pieces)
        if in_one_pass(optimizer):
            optimizer.host_step = HostStep(  # type: ignore[attr-defined]
                factor,
                {piece.master: piece.gradient for piece in pieces if piece.gradient is not None},
                {piece.master: out for piece, out in zip(pieces, outs, strict=True)},
            )
            try:
                optimizer.step()
            finally:
                optimizer.host_step = None  # type: ignore[attr-defined]
        else:
            self._step_plainly(pieces, outs, optimizer, factor)
        self._send(pieces, outs)

    def finish(self) -> None:
        """Whatever the device does next sees the new weights."""
        for event in self._events:
            if event is not None:
                event.wait()

    def _step_plainly(
        self, pieces: Sequence[Piece], outs: Sequence[Tensor], optimizer: Optimizer, factor: float
    ) -> None:
        grads = [_gradient(piece) for piece in pieces]
        if factor != 1.0:
            scale_(grads, factor)
        for piece, grad in zip(pieces, grads, strict=True):
            piece.master.grad = grad
        optimizer.step()
        for piece, out in zip(pieces, outs, strict=True):
            piece.master.grad = None
            out.copy_(piece.master)

    # ---- back to the device

    def _outs(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Where each piece's new weights are written: the parameter itself, or a buffer from which they are copied."""
        if not pieces or pieces[0].source.device.type == "cpu":
            return [piece.source for piece in pieces]
        sizes = [_aligned(piece.source.nbytes) for piece in pieces]
        lines = self._buffer(sum(sizes)).split(sizes)
        return [
            line[: piece.source.nbytes].view(piece.source.dtype).view(piece.source.shape)
            for piece, line in zip(pieces, lines, strict=True)
        ]

    def _buffer(self, size: int) -> Tensor:
        """The older of two buffers, once its last content is on the device."""
        if len(self._buffers) < 2:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
            self._events.append(None)
        else:
            self._buffers.append(self._buffers.pop(0))
            self._events.append(self._events.pop(0))
            if self._events[-1] is not None:
                self._events[-1].synchronize()
        if self._buffers[-1].numel() < size:
            self._buffers[-1] = host_empty(size, torch.uint8, pinned=self._pinned)
        return self._buffers[-1][:size]

    def _send(self, pieces: Sequence[Piece], outs: Sequence[Tensor]) -> None:
        if not pieces or pieces[0].source.device.type == "cpu":
            return
        if self._beside is None:
            self._beside = Beside(pieces[0].source.device)
        with self._beside:
            torch._foreach_copy_([piece.source for piece in pieces], list(outs), non_blocking=True)
            self._events[-1] = self._beside.record()


def _gradient(piece: Piece) -> Tensor:
    assert piece.gradient is not None, "pieces without a gradient are left alone"
    return piece.gradient.to(piece.master.dtype).view(piece.master.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
