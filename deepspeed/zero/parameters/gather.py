"""Make parameters whole: one collective for many small ones, none with a copy for large ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.coalesced import all_gather_coalesced
from deepspeed.zero.parameters.shard import Shard

__all__ = ["Fetcher", "finish", "gather", "release", "spread", "start"]

# Below this size a collective costs more than the copy that lets several parameters share one.
_PACKED_BYTES = 1 << 18


@dataclass(frozen=True)
class Fetcher:
    """How parameters are gathered."""

    by_all_reduce: bool = False
    one_by_one: bool = False

    @torch.no_grad()
    def start(self, shards: Sequence[Shard]) -> None:
        """Begin to make these whole, whether or not they are; `finish` before use.

        Every rank of the axis must start the same shards in the same order.
        """
        for shard in shards:
            shard.allocate()
        if self.by_all_reduce:
            for shard in shards:
                shard.pending = _by_all_reduce(shard)
            return
        small = [] if self.one_by_one else [s for s in shards if _bytes(s) < _PACKED_BYTES]
        packed = set(map(id, small)) if len(small) > 1 else set()
        if packed:
            _together(small)
        for shard in shards:
            if id(shard) not in packed:
                with comm.labelled(shard.name):
                    shard.pending = _pending(
                        comm.all_gather_into_tensor(shard.flat, shard.data, group=shard.axis.group, async_op=True)
                    )

    def finish(self, shards: Sequence[Shard]) -> None:
        """Wait for what was started; the parameters are whole then."""
        for shard in shards:
            if shard.pending is not None:
                shard.pending.wait()
            shard.attach()


_DEFAULT = Fetcher()


def start(shards: Sequence[Shard]) -> None:
    """Begin to make these whole."""
    _DEFAULT.start([shard for shard in shards if not shard.alone])


def finish(shards: Sequence[Shard]) -> None:
    """Wait for what was started."""
    _DEFAULT.finish(shards)


def gather(shards: Sequence[Shard]) -> None:
    """Make these whole now."""
    start(shards)
    finish(shards)


@torch.no_grad()
def spread(shards: Sequence[Shard], source: int = 0) -> None:
    """Let every rank cut what one rank of the axis has as the whole parameters; all of them are whole."""
    for shard in shards:
        shard.reclaim()
        if not shard.alone:
            with comm.labelled(shard.name):
                comm.broadcast(shard.flat, src=shard.axis.ranks[source], group=shard.axis.group)
        shard.store()
        shard.version = shard.param._version


def release(shards: Sequence[Shard]) -> None:
    """Let go of those that nobody holds and that need not stay whole."""
    for shard in shards:
        if shard.whole and not shard.persistent and not shard.holds:
            shard.release()


def _bytes(shard: Shard) -> int:
    return shard.flat.numel() * shard.flat.element_size()


def _pending(work: Any) -> Pending[Any]:
    return Pending(None, work)


def _together(shards: Sequence[Shard]) -> None:
    kinds: dict[Any, list[Shard]] = {}
    for shard in shards:
        kinds.setdefault((shard.dtype, shard.axis.group), []).append(shard)
    for (_, group), alike in kinds.items():
        with comm.labelled(f"{alike[0].name} … {alike[-1].name}"):
            work = all_gather_coalesced([s.flat for s in alike], [s.data for s in alike], group=group, async_op=True)
        shared = _pending(work)
        for shard in alike:
            shard.pending = shared


def _by_all_reduce(shard: Shard) -> Pending[Any]:
    at: Tensor = shard.flat
    at.zero_()
    begin = shard.axis.rank * shard.chunk
    at[begin : begin + shard.chunk].copy_(shard.data)
    with comm.labelled(shard.name):
        return _pending(comm.all_reduce(at, group=shard.axis.group, async_op=True))
