"""Steps of tiles away from the device: the host updates them while everybody else goes on.

[Note: a step of the host] Gradients and hyperparameters are those of the moment at which the step began: the worker has
an optimizer of its own that shares nothing but the states. New weights return to the device while the next tile is
updated. Whoever needs a parameter, a state or the memory of a gradient waits for its tile; see `late.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.beside import Beside
from deepspeed.memory.host import host_empty
from deepspeed.memory.store import Store, through
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.multi_tensor import scale_
from deepspeed.ops.one_pass import OnePass
from deepspeed.zero.states.pace import Pace
from deepspeed.zero.states.piece import Piece
from deepspeed.zero.states.streaming import Streamer, can_stream
from deepspeed.zero.states.tiles import Tile, choose, twin
from deepspeed.zero.states.turn import Turn, Turns

__all__ = ["Afar", "in_one_pass"]

_ALIGNMENT = 64  # bytes; where the weights of a piece begin in a buffer
_BUFFERS = 8  # through which weights return: the bus may be busy with other tiles for a while


def in_one_pass(optimizer: Optimizer) -> bool:
    """True for optimizers that unscale, clip, update and round in one pass over host memory."""
    return isinstance(optimizer, (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad))


class Afar:
    """Takes the steps of tiles that live away from the device."""

    def __init__(self, pace: Pace, store: Store[Tile], *, defers: bool) -> None:
        """If it `defers`, all gradients are needed in host memory: the device keeps no tiles."""
        self._pace, self._store, self._defers = pace, store, defers
        self._buffers: list[Tensor] = []
        self._events: list[Any] = []
        """Behind the copy out of each buffer."""
        self._beside: Beside | None = None
        self._streamer: Streamer | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._turns: list[Turn] = []
        self._staying: list[Turn] = []
        """Those of them whose tiles the device keeps."""
        self._bounded = False

    def begin(self, turns: Sequence[Turn], optimizer: Optimizer, factor: float, *, late: bool) -> None:
        """Update tiles with their gradients times `factor`; if it may be `late`, while the caller goes on."""
        self._turns = list(turns)
        device = next((piece.param.device for turn in turns for piece in turn.pieces), torch.device("cpu"))
        if self._beside is None and device.type != "cpu":
            self._beside = Beside(device)
        if self._beside is not None:
            with self._beside:  # weights that are in use until now are not overwritten before
                pass
        stay = None if any(turn.before for turn in turns) else can_stream(turns, optimizer, device)
        self._staying, others = [], list(turns)
        if stay is None:
            self._bring_home(turns)
        else:
            self._streamer = self._streamer or Streamer(device, 0 if self._defers else stay)
            self._staying, others = self._streamer.welcome(turns)
            self._streamer.begin()
        if self._workers is None and (late or self._streamer is not None):
            self._workers = ThreadPoolExecutor(2, thread_name_prefix="deepspeed-host-step")
        if late:
            assert self._workers is not None, "made above"
            self._running = self._workers.submit(self._run_beside, others, twin(optimizer), factor, device)
        else:
            self._run(others, optimizer, factor)

    def _bring_home(self, turns: Sequence[Turn]) -> None:
        """The device keeps no states from now on, and no gradients."""
        if self._streamer is None:
            return
        self._streamer.leave()
        self._streamer = None
        if self._defers:  # it kept none, and turns have other gradients than their pieces
            return
        for turn in turns:
            turn.take_gradients()

    def settle(self) -> None:
        """Nothing is on its way any more."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()
        turns, self._turns = self._turns, []
        for turn in turns:
            turn.settle()

    def close(self) -> None:
        """End the workers; what they do is finished."""
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None

    # ---- the step

    def _run_beside(self, turns: Sequence[Turn], optimizer: Optimizer, factor: float, device: torch.device) -> None:
        if device.type != "cpu":
            get_accelerator().set_device(device.index or 0)
        if self._pace.cores < 1 and not self._bounded:
            torch.set_num_threads(max(int(torch.get_num_threads() * self._pace.cores), 1))  # of this thread alone
            self._bounded = True
        try:
            self._run(turns, optimizer, factor)
        except BaseException as error:
            for turn in self._turns:
                turn.finish(error)  # those that are through already are no worse for it: the engine is broken
            raise

    def _run(self, turns: Sequence[Turn], optimizer: Optimizer, factor: float) -> None:
        if self._streamer is not None and self._workers is not None:
            left = Turns(turns)
            beside = self._workers.submit(self._stream, left, twin(optimizer), factor)
            for turn in iter(left.first, None):
                self._step(turn, optimizer, factor)
            beside.result()
            return
        for turn in turns:
            if turn.before is not None:
                turn.before()
            if turn.only_before:  # nothing has to be fetched for that
                turn.finish()
        by_tile = {id(turn.tile): turn for turn in turns if not turn.only_before}

        def work(tile: Tile) -> None:
            self._step(by_tile[id(tile)], optimizer, factor)

        tiles = [turn.tile for turn in turns if not turn.only_before]
        through(tiles, self._store, work, ahead=self._pace.ahead, behind=self._pace.behind)

    def _stream(self, left: Turns, optimizer: Optimizer, factor: float) -> None:
        """Let the device update what it keeps, then the others from their end."""
        streamer = self._streamer
        assert streamer is not None, "only then there is something to stream"

        def step(turn: Turn) -> None:
            choose(optimizer, turn.tile)
            streamer.step(turn, optimizer, factor)
            turn.finish()

        for turn in self._staying:
            step(turn)
        streamer.ready()
        for turn in iter(left.last, None):
            step(turn)
            streamer.ready()

    @torch.no_grad()
    def _step(self, turn: Turn, optimizer: Optimizer, factor: float) -> None:
        choose(optimizer, turn.tile)
        factor = factor if turn.factor is None else turn.factor
        if turn.tile.arena is not None:
            turn.tile.arena.claim()
        outs = self._outs(turn.pieces)
        if in_one_pass(optimizer):
            masters = [piece.master for piece in turn.pieces]
            optimizer.one_pass = OnePass(  # type: ignore[attr-defined]
                factor, dict(zip(masters, turn.grads, strict=True)), dict(zip(masters, outs, strict=True))
            )
            try:
                optimizer.step()
            finally:
                optimizer.one_pass = None  # type: ignore[attr-defined]
        else:
            _step_plainly(turn, outs, optimizer, factor)
        if turn.after is not None:
            turn.after(outs)
        self._send(turn, outs)
        turn.finish()

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
        """The oldest buffer, once its last content is on the device."""
        if len(self._buffers) < _BUFFERS:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
            self._events.append(None)
        else:
            self._buffers.append(self._buffers.pop(0))
            self._events.append(self._events.pop(0))
            if self._events[-1] is not None:
                self._events[-1].synchronize()
        if self._buffers[-1].numel() < size:
            self._buffers[-1] = host_empty(size, torch.uint8, pinned=self._pace.pinned)
        return self._buffers[-1][:size]

    def _send(self, turn: Turn, outs: Sequence[Tensor]) -> None:
        if self._beside is None or not turn.pieces or outs[0] is turn.pieces[0].source:
            return
        sources = [piece.source for piece in turn.pieces]
        if self._streamer is not None:
            self._events[-1] = turn.sent = self._streamer.carry(sources, outs)
            return
        with self._beside.again():
            torch._foreach_copy_(sources, list(outs), non_blocking=True)
            self._events[-1] = turn.sent = self._beside.record()


def _step_plainly(turn: Turn, outs: Sequence[Tensor], optimizer: Optimizer, factor: float) -> None:
    """By an optimizer that knows nothing of this: gradients on its parameters, unscaled and clipped before."""
    for piece, grad in zip(turn.pieces, turn.grads, strict=True):
        wide = grad.to(piece.master.dtype).view(piece.master.shape)
        scale_([wide], factor)
        piece.master.grad = wide
    optimizer.step()
    for piece, out in zip(turn.pieces, outs, strict=True):
        piece.master.grad = None
        out.copy_(piece.master)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
