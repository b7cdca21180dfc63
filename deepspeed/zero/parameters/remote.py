"""`Remote`: where chunks of parameters live that are not on the device, and how they become whole on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from deepspeed.accelerator.beside import Beside
from deepspeed.comm import Pending
from deepspeed.comm.pending import EventWait
from deepspeed.memory.host import Slabs
from deepspeed.memory.tier import EVERYTHING_AWAY, Rooms, Tier

if TYPE_CHECKING:
    from deepspeed.zero.parameters.gather import Gather
    from deepspeed.zero.parameters.shard import Shard

__all__ = ["HostGather", "InHostMemory", "Remote", "Remotes"]


class Remote(Protocol):
    """A tier in which chunks live."""

    device: torch.device
    """Where the parameters are used."""

    def keep(self, chunk: Tensor) -> Tensor:
        """A tensor of that tier with these values."""


@dataclass(frozen=True)
class Remotes:
    """Where the chunks of a model live that leave the device."""

    remote: Remote
    rooms: Rooms = EVERYTHING_AWAY

    def choose(self, chunk: int) -> Remote | None:
        """Where the next chunk lives, of so many elements; None: on the device."""
        return None if self.rooms.place([chunk]) == [Tier.DEVICE] else self.remote


class InHostMemory:
    """Chunks in host memory, page-locked if that is asked for."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.device = device
        self._slabs = Slabs(pinned=pinned)

    def keep(self, chunk: Tensor) -> Tensor:
        """See `Remote`."""
        return self._slabs.take(chunk.numel(), chunk.dtype).copy_(chunk)


class HostGather:
    """From host memory to the device on a stream of its own; then, where there are several ranks, by `among`."""

    def __init__(self, device: torch.device, among: Gather) -> None:
        self._among = among
        self._beside = Beside(device)

    @torch.no_grad()
    def start(self, shards: Sequence[Shard]) -> None:
        """See `deepspeed.zero.parameters.gather.Gather`."""
        single = [shard for shard in shards if shard.axis.size == 1]
        several = [shard for shard in shards if shard.axis.size > 1]
        # Memory belongs to the stream that computes: the other one writes it only after what is queued there now.
        for shard in shards:
            shard.allocate()
        with self._beside:
            if single:
                targets, sources = [shard.flat for shard in single], [shard.data for shard in single]
                torch._foreach_copy_(targets, sources, non_blocking=True)
                copied = Pending(None, EventWait(self._beside.record()) if self._beside.device else None)
                for shard in single:
                    shard.pending = copied
            for shard in several:
                shard.staged = shard.data.to(shard.device, non_blocking=True)
            if several:
                self._among.start(several)
