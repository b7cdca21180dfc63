"""Chunks of parameters that live in host memory or in files, and how they become whole on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.accelerator.side_stream import SideStream
from deepspeed.comm import Pending
from deepspeed.comm.pending import EventWait
from deepspeed.memory.host import HostSlabs, host_empty
from deepspeed.memory.tier import EVERYTHING_AWAY, SwapFile, Tier, TierRule
from deepspeed.ops.aio import FileEngine, FileTicket
from deepspeed.zero.parameters.gather import Gather, GatherFor
from deepspeed.zero.parameters.shard import Shard


class ChunkTier(Protocol):
    """A tier in which chunks live."""

    device: torch.device
    """Where the parameters are used."""

    def keep(self, chunk: Tensor) -> Tensor:
        """A tensor of that tier with these values."""


@dataclass(frozen=True)
class ChunkTiers:
    """Where the chunks of a model live that leave the device."""

    remote: ChunkTier
    rooms: TierRule = EVERYTHING_AWAY

    def choose(self, chunk: int) -> ChunkTier | None:
        """Where the next chunk lives, of so many elements; None: on the device."""
        return None if self.rooms.place([chunk]) == [Tier.DEVICE] else self.remote


class HostChunks:
    """Chunks in host memory, page-locked if that is asked for."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.device = device
        self._slabs = HostSlabs(pinned=pinned)

    def keep(self, chunk: Tensor) -> Tensor:
        return self._slabs.take(chunk.numel(), chunk.dtype).copy_(chunk)


class HostGather:
    """From host memory to the device on a stream of its own; then, where there are several ranks, by `among`."""

    def __init__(self, device: torch.device, among: Gather[Shard]) -> None:
        self._among = among
        self._side_stream = SideStream(device)

    @torch.no_grad()
    def start(self, shards: Sequence[Shard], serves: GatherFor) -> None:
        single = [shard for shard in shards if shard.axis.size == 1]
        several = [shard for shard in shards if shard.axis.size > 1]
        # Memory belongs to the stream that computes: the other one writes it only after what is queued there now.
        for shard in shards:
            shard.allocate()
        with self._side_stream:
            if single:
                targets, sources = [shard.flat for shard in single], [shard.data for shard in single]
                torch._foreach_copy_(targets, sources, non_blocking=True)
                copied = Pending(None, EventWait(self._side_stream.record()) if self._side_stream.device else None)
                for shard in single:
                    shard.pending = copied
            for shard in several:
                shard.staged = shard.data.to(shard.device, non_blocking=True)
            if several:
                self._among.start(several, serves)


@dataclass(frozen=True)
class ChunkLimits:
    """What of the host's memory chunks on the disk may use."""

    in_memory: int
    """Elements that stay in host memory, the first ones of the model (`max_in_cpu`)."""
    buffers: int
    """Through which what is read goes to a device (`buffer_count`)."""
    buffer: int
    """Elements of each (`buffer_size`)."""
    pinned: bool


class FileChunks:
    """`deepspeed.zero.parameters.offloaded.ChunkTier`: chunks in a swap file, except the first ones."""

    def __init__(self, device: torch.device, swap: SwapFile, engine: FileEngine, limits: ChunkLimits) -> None:
        self.device = device
        self._swap, self._engine, self._limits = swap, engine, limits
        self._room = limits.in_memory
        self._slabs = HostSlabs(pinned=limits.pinned)
        self._free: deque[tuple[Tensor, Any]] = deque()
        """Buffers, each with the event behind the last copy out of it."""
        self._made = 0
        self._side_stream = SideStream(device)

    def keep(self, chunk: Tensor) -> Tensor:
        if chunk.numel() <= self._room:
            self._room -= chunk.numel()
            return self._slabs.take(chunk.numel(), chunk.dtype).copy_(chunk)
        return self._swap.take(chunk.numel(), chunk.dtype).copy_(chunk)

    def reserve(self, chunks: Iterable[tuple[int, torch.dtype]]) -> None:
        """Make sure of space for chunks that will be kept in this order, by elements and dtype."""
        room, resting = self._room, []
        for numel, dtype in chunks:
            if numel <= room:
                room -= numel
            else:
                resting.append(numel * dtype.itemsize)
        self._swap.reserve(resting)

    def rests(self, chunk: Tensor) -> bool:
        """True if a chunk lies in the file."""
        return self._swap.holds(chunk)

    def read(self, chunks: Sequence[tuple[Tensor, Tensor]]) -> ChunkRead:
        """Begin to bring chunks, each to memory where its parameter is used."""
        with self._side_stream:  # what is queued now may still use that memory
            pass
        return ChunkRead(self, [part for chunk, target in chunks for part in self._parts(chunk, target)])

    def _parts(self, chunk: Tensor, target: Tensor) -> list[_Part]:
        offset, size = self._swap.offset_of(chunk), chunk.dtype.itemsize
        if self.device.type == "cpu":
            return [_Part(offset, target)]
        step = max(self._limits.buffer, 1)
        parts = target.split(step)
        return [_Part(offset + place * step * size, part) for place, part in enumerate(parts)]

    def begin(self, part: _Part, *, must: bool = False) -> bool:
        """Start a read; False if all buffers are in use, unless it `must` be: then there is one more."""
        if self.device.type != "cpu":
            if not self._free and self._made >= max(self._limits.buffers, 1) and not must:
                return False
            part.buffer = self._buffer(part.target.nbytes)
        part.ticket = self._engine.read(self._swap.path, part.filled, part.offset)
        return True

    def finish(self, part: _Part) -> None:
        """Wait for a read and send what came to the device."""
        assert part.ticket is not None, "only what was begun finishes"
        part.ticket.wait()
        if part.buffer is not None:
            with self._side_stream.again():
                part.target.copy_(part.filled, non_blocking=True)
                self._free.append((part.buffer, self._side_stream.record()))

    def done(self) -> None:
        """What computes waits for all that was sent."""
        if self._side_stream.device:
            self._side_stream.record().wait()

    def _buffer(self, size: int) -> Tensor:
        """One that is free, or a new one; of at least so many bytes."""
        if self._free:
            buffer, event = self._free.popleft()
            event.synchronize()
            if buffer.numel() >= size:
                return buffer
        else:
            self._made += 1
        return host_empty(size, torch.uint8, pinned=self._limits.pinned)


@dataclass(eq=False, slots=True)
class _Part:
    """Neighbouring elements of a chunk that are read together."""

    offset: int
    target: Tensor
    buffer: Tensor | None = None
    """Host memory through which they go to a device."""
    ticket: FileTicket | None = None

    @property
    def filled(self) -> Tensor:
        """What the read writes."""
        target = self.target
        return target if self.buffer is None else self.buffer[: target.nbytes].view(target.dtype)


class ChunkRead:
    """Chunks on their way from the file; as many parts as there are buffers are being read ahead."""

    def __init__(self, files: FileChunks, parts: Sequence[_Part]) -> None:
        self._files = files
        self._waiting = deque(parts)
        self._flying: deque[_Part] = deque()
        self._begin()

    def wait(self) -> None:
        """Everything is where it is used, or the device knows when it is."""
        while self._flying or self._waiting:
            if not self._flying:  # those that have the buffers are waited for later than this one
                self._begin(must=True)
            self._files.finish(self._flying.popleft())
            self._begin()
        self._files.done()

    def is_completed(self) -> bool:
        """True if `wait` would not wait for the disk."""
        return not self._waiting and all(part.ticket and part.ticket.is_completed() for part in self._flying)

    def _begin(self, *, must: bool = False) -> None:
        while self._waiting and self._files.begin(self._waiting[0], must=must):
            self._flying.append(self._waiting.popleft())
            must = False


class FileGather:
    """`Gather` for chunks some of which rest in a file; then, where there are several ranks, by `among`."""

    def __init__(self, files: FileChunks, among: Gather[Shard]) -> None:
        self._files, self._among = files, among
        self._host = HostGather(files.device, among)

    @torch.no_grad()
    def start(self, shards: Sequence[Shard], serves: GatherFor) -> None:
        resting = [shard for shard in shards if self._files.rests(shard.data)]
        lying = [shard for shard in shards if not self._files.rests(shard.data)]
        if resting:
            self._read(resting, serves)
        if lying:
            self._host.start(lying, serves)

    def _read(self, shards: Sequence[Shard], serves: GatherFor) -> None:
        several = [shard for shard in shards if shard.axis.size > 1]
        for shard in shards:
            shard.allocate()
        for shard in several:
            shard.staged = torch.empty(shard.chunk, dtype=shard.dtype, device=shard.device)
        targets = [shard.flat if shard.staged is None else shard.staged for shard in shards]
        reading = self._files.read([(shard.data, target) for shard, target in zip(shards, targets, strict=True)])

        def exchange(_: None) -> None:
            if several:
                self._among.start(several, serves)
                for shard in several:
                    if shard.pending is not None:
                        shard.pending.wait()

        pending = Pending(None, reading, exchange)
        for shard in shards:
            shard.pending = pending
