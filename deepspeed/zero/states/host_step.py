"""Steps of tiles away from the device: by the host, or by the device with states that come over the bus.

Both work at once, two tiles on their way at a time. A few tiles, which the next forward needs first, may stay on the
device with their gradients; their states go to the host when they are asked for.

[Note: a step of the host] Gradients and hyperparameters are those of the moment at which the step began: the worker has
an optimizer of its own that shares only the states. Whoever needs a parameter, a state or the memory of a gradient
waits for its tile; see `late_parameters.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.side_stream import SideStream
from deepspeed.memory.host import host_empty
from deepspeed.memory.tier import StateStore, through
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.multi_tensor import scale_
from deepspeed.ops.one_pass import OnePass
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.states.tiles import OffloadedTile, StepTiling, Tile, TileUpdate, choose, twin

_SLOTS = 2
_SPARE = 0.10  # of the device's memory that stays free
_CACHE = 0.05  # of the device's memory for tiles that stay
_GRADIENT = "gradient"


def can_stream(turns: Sequence[TileUpdate], optimizer: Optimizer, device: torch.device) -> int | None:
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


def _size(arena: OffloadedTile) -> int:
    return sum(room.nbytes for room in arena.rooms.values()) + arena.gradients.nbytes


def _complete(arena: OffloadedTile, optimizer: Optimizer) -> bool:
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


class StateStreamer:
    """Updates tiles on the device."""

    def __init__(self, device: torch.device, stay: int) -> None:
        """`stay` tiles have memory of the device for good."""
        self._device = device
        self._slots = [_Slot() for _ in range(_SLOTS)]
        self._stay = stay
        self._staying: dict[OffloadedTile, _Slot] = {}
        accelerator = get_accelerator()
        self._comes, self._works, self._goes = (accelerator.Stream() for _ in range(3))

    def choose_staying(self, turns: Sequence[TileUpdate]) -> tuple[list[TileUpdate], list[TileUpdate]]:
        """Let the first tiles stay, as long as there is room; returns the turns of those that do, and the others."""
        staying: list[TileUpdate] = []
        others: list[TileUpdate] = []
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
    def step(self, turn: TileUpdate, optimizer: Optimizer, factor: float) -> None:
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
    def _go_home(self, arena: OffloadedTile, here: dict[str, Tensor], *, wait: bool = False) -> Any:
        """Queue the states of a tile to the host; returns the event behind that."""
        with get_accelerator().stream(self._goes):
            self._goes.wait_stream(self._works)
            for kind, flat in arena.rooms.items():
                flat.copy_(here[kind], non_blocking=True)
            event = _event(self._goes)
        if wait:
            event.synchronize()
        return event

    def _slot(self, arena: OffloadedTile) -> tuple[_Slot, bool]:
        """Memory for a tile, and whether its states are there already."""
        if arena in self._staying:
            return self._staying[arena], arena.mirrored
        slot = self._slots.pop(0)
        self._slots.append(slot)
        return slot, False

    def _update(
        self, turn: TileUpdate, arena: OffloadedTile, here: dict[str, Tensor], optimizer: Optimizer, factor: float
    ) -> None:
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


_ALIGNMENT = 64  # bytes; where the weights of a piece begin in a buffer
_BUFFERS = 8  # through which weights return: the bus may be busy with other tiles for a while


def in_one_pass(optimizer: Optimizer) -> bool:
    """True for optimizers that unscale, clip, update and round in one pass over host memory."""
    return isinstance(optimizer, (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad))


class HostStep:
    """Takes the steps of tiles that live away from the device."""

    def __init__(self, pace: StepTiling, store: StateStore[Tile], *, defers: bool) -> None:
        """If it `defers`, all gradients are needed in host memory: the device keeps no tiles."""
        self._pace, self._store, self._defers = pace, store, defers
        self._buffers: list[Tensor] = []
        self._events: list[Any] = []
        """Behind the copy out of each buffer."""
        self._side_stream: SideStream | None = None
        self._streamer: StateStreamer | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._turns: list[TileUpdate] = []
        self._staying: list[TileUpdate] = []
        """Those of them whose tiles the device keeps."""
        self._bounded = False

    def begin(self, turns: Sequence[TileUpdate], optimizer: Optimizer, factor: float, *, late: bool) -> None:
        """Update tiles with their gradients times `factor`; if it may be `late`, while the caller goes on."""
        self._turns = list(turns)
        device = next((piece.param.device for turn in turns for piece in turn.pieces), torch.device("cpu"))
        if self._side_stream is None and device.type != "cpu":
            self._side_stream = SideStream(device)
        if self._side_stream is not None:
            with self._side_stream:  # weights that are in use until now are not overwritten before
                pass
        stay = None if any(turn.before for turn in turns) else can_stream(turns, optimizer, device)
        self._staying, others = [], list(turns)
        if stay is None:
            self._bring_back(turns)
        else:
            self._streamer = self._streamer or StateStreamer(device, 0 if self._defers else stay)
            self._staying, others = self._streamer.choose_staying(turns)
            self._streamer.begin()
        if self._workers is None and (late or self._streamer is not None):
            self._workers = ThreadPoolExecutor(2, thread_name_prefix="deepspeed-host-step")
        if late:
            assert self._workers is not None, "made above"
            self._running = self._workers.submit(self._run_in_worker, others, twin(optimizer), factor, device)
        else:
            self._run(others, optimizer, factor)

    def _bring_back(self, turns: Sequence[TileUpdate]) -> None:
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

    def _run_in_worker(
        self, turns: Sequence[TileUpdate], optimizer: Optimizer, factor: float, device: torch.device
    ) -> None:
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

    def _run(self, turns: Sequence[TileUpdate], optimizer: Optimizer, factor: float) -> None:
        if self._streamer is not None and self._workers is not None:
            left = deque(turns)  # two take from its ends until none is left
            streaming = self._workers.submit(self._stream, left, twin(optimizer), factor)
            for turn in _until_empty(left.popleft):
                self._step(turn, optimizer, factor)
            streaming.result()
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

    def _stream(self, left: deque[TileUpdate], optimizer: Optimizer, factor: float) -> None:
        """Let the device update what it keeps, then the others from their end."""
        streamer = self._streamer
        assert streamer is not None, "only then there is something to stream"

        def step(turn: TileUpdate) -> None:
            choose(optimizer, turn.tile)
            streamer.step(turn, optimizer, factor)
            turn.finish()

        for turn in self._staying:
            step(turn)
        streamer.ready()
        for turn in _until_empty(left.pop):
            step(turn)
            streamer.ready()

    @torch.no_grad()
    def _step(self, turn: TileUpdate, optimizer: Optimizer, factor: float) -> None:
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

    def _outs(self, pieces: Sequence[StatePiece]) -> list[Tensor]:
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

    def _send(self, turn: TileUpdate, outs: Sequence[Tensor]) -> None:
        if self._side_stream is None or not turn.pieces or outs[0] is turn.pieces[0].source:
            return
        sources = [piece.source for piece in turn.pieces]
        if self._streamer is not None:
            self._events[-1] = turn.sent = self._streamer.carry(sources, outs)
            return
        with self._side_stream.again():
            torch._foreach_copy_(sources, list(outs), non_blocking=True)
            self._events[-1] = turn.sent = self._side_stream.record()


def _until_empty(take: Callable[[], TileUpdate]) -> Iterator[TileUpdate]:
    """What `take` returns until its deque is empty."""
    with suppress(IndexError):
        while True:
            yield take()


def _step_plainly(turn: TileUpdate, outs: Sequence[Tensor], optimizer: Optimizer, factor: float) -> None:
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
