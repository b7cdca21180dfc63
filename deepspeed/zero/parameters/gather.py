"""`Gather`: how shards become whole. One operation for a block, without a copy where the backend can batch.

Each shard knows its gather, so that the engine and users make it whole in the same way. `deepspeed.zero.build` chooses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator.side_stream import SideStream
from deepspeed.comm import Pending
from deepspeed.comm.coalesced import BATCHING, all_gather_lines, broadcast_coalesced
from deepspeed.comm.groups import played_backend
from deepspeed.comm.pending import EventWait, WaitableWork
from deepspeed.comm.point_to_point import gather_parts
from deepspeed.parallel import AxisGroup
from deepspeed.zero.parameters.data import show
from deepspeed.zero.parameters.shard import Shard

# A chunk of this many bytes is better sent from where it lies than packed with others; gloo copies anyway.
_WORTH_PACKING = {"gloo": 1 << 17, "others": 2 << 20}
# One of this many is gathered without the second copy that gloo makes.
_WORTH_SPARING = 1 << 20
_backends: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # torch's own look-up takes a while


class GatherFor(Enum):
    """What parameters are made whole for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    """An optimizer step has updated them."""
    ACCESS = "access"
    """They are read or written: by a user, a checkpoint, `Init`."""


T = TypeVar("T")
K = TypeVar("K")
T_contra = TypeVar("T_contra", contravariant=True)


class Gather(Protocol[T_contra]):
    """Makes shards of one axis whole: those of parameters (`Shard`), or flat buffers (`FlatBlocks`)."""

    def start(self, shards: Sequence[T_contra], serves: GatherFor) -> None:
        """Begin; each shard's `pending` says when it is whole. All ranks start the same shards in the same order."""


@dataclass(eq=False)
class FlatBlocks:
    """A flat buffer that every rank has, and of which it owns a block that it has changed."""

    name: str
    axis: AxisGroup
    flat: Tensor
    sent: Tensor
    """The block, within `flat`."""
    pending: Pending[Any] | None = None


@dataclass(frozen=True)
class BlockGather:
    """Blocks of all ranks by all-gather; in place, or through a smaller buffer where backends need a copy."""

    limit: int
    """Elements that are gathered at a time where memory has to be bounded (`allgather_bucket_size`)."""
    exact: bool = True
    """A rank's own block is what it was."""

    @torch.no_grad()
    def start(self, shards: Sequence[FlatBlocks], serves: GatherFor) -> None:
        for each in shards:
            with comm.labelled(each.name):
                each.pending = self._one(each)

    def _one(self, each: FlatBlocks) -> Pending[Any]:
        world, group, shard = each.axis.size, each.axis.group, each.sent.numel()
        if each.flat.numel() <= self.limit or each.flat.device.type != "cpu":
            return Pending(None, comm.all_gather_into_tensor(each.flat, each.sent, group=group, async_op=True))
        rows = each.flat.view(world, shard)
        step = max(self.limit // world, 1)
        for at in range(0, shard, step):
            mine = each.sent[at : at + step]
            some = mine.new_empty(world, len(mine))
            comm.all_gather_into_tensor(some.view(-1), mine.contiguous(), group=group)
            rows[:, at : at + step].copy_(some)
        return Pending(None)


Cut = tuple[Shard, AxisGroup, Tensor]
"""A parameter that becomes whole from parts of equal length on the ranks of an axis, and this rank's part."""


@dataclass(frozen=True, eq=False)
class NodeHops:
    """Gathers in two hops where an axis spans nodes: among the ranks of one place in all nodes, then within a node.

    A chunk goes to each other node once, and never through a rank of a third one.
    """

    side: SideStream
    """Where a device waits for the first hop."""

    def start(self, mine: Tensor, axis: AxisGroup) -> GatheredRows:
        """What all ranks of the axis have; see `gather_rows`."""
        assert axis.nodes is not None, "its nodes are known"
        inter, intra = axis.nodes
        gathered, first = mine.new_empty(axis.size * mine.numel()), mine.new_empty(inter.size * mine.numel())
        with self.side:
            comm.all_gather_into_tensor(first, mine, group=inter.group)
            second = mine.new_empty(gathered.numel())
            work = comm.all_gather_into_tensor(second, first, group=intra.group, async_op=True)
            if not self.side.device:
                return GatheredRows(gathered, work, lambda: _by_node(second, gathered, axis))
            if work is not None:
                work.wait()
            _by_node(second, gathered, axis)
        return GatheredRows(gathered, EventWait(self.side.record()), lambda: None, (mine, first, second))


def _by_node(second: Tensor, gathered: Tensor, axis: AxisGroup) -> None:
    """Bring rows from the order of places and then nodes to that of ranks."""
    assert axis.nodes is not None, "its nodes are known"
    inter, intra = axis.nodes
    gathered.view(inter.size, intra.size, -1).copy_(second.view(intra.size, inter.size, -1).transpose(0, 1))


@dataclass(eq=False)
class GatheredRows:
    """What all ranks of an axis have, side by side, once it is waited for."""

    result: Tensor
    work: WaitableWork | None
    last: Callable[[], None] = lambda: None
    """What is left to do then."""
    kept: tuple[Tensor, ...] = ()
    """What a stream still reads until then."""

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.last()
        self.kept = ()

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()


def gather_rows(mine: Tensor, axis: AxisGroup, hops: NodeHops | None) -> GatheredRows:
    """What all ranks of an axis have, in their order; by `hops` where nodes are known."""
    if hops is not None and axis.nodes is not None:
        return hops.start(mine, axis)
    gathered = mine.new_empty(axis.size * mine.numel())
    return GatheredRows(gathered, comm.all_gather_into_tensor(gathered, mine, group=axis.group, async_op=True))


@dataclass(frozen=True)
class PlainGather:
    """By all-gather of the chunks as they are, or of what `cut` gives; a block costs few calls for each shard."""

    by_all_reduce: bool = False
    one_by_one: bool = False
    cut: Callable[[Shard], Cut] | None = None
    hops: NodeHops | None = None

    def start(self, shards: Sequence[Shard], serves: GatherFor) -> None:
        if self.cut is not None:
            cuts = [self.cut(shard) for shard in shards]
        else:
            cuts = [
                (each, each.axis, each.stored if each.staged is None and each.codec is None else each.sent)
                for each in shards
            ]
        if self.by_all_reduce:
            for cut in cuts:
                cut[0].pending = _by_all_reduce(cut)
            return
        for (_, axis), alike in _grouped(cuts, [(shard.dtype, axis) for shard, axis, _ in cuts]):
            group = axis.group
            if self.hops is not None and axis.nodes is not None:
                for few in [[cut] for cut in alike] if self.one_by_one else [alike]:
                    _packed(few, axis, self.hops)
                continue
            backend = _backend(group)
            limit = 1 << 60 if backend in BATCHING else _WORTH_PACKING.get(backend, _WORTH_PACKING["others"])
            together = [] if self.one_by_one else [cut for cut in alike if cut[2].nbytes < limit]
            if len(together) < 2:
                together = []
            elif backend in BATCHING:
                _batched(together, group)
            else:
                _packed(together, axis)
            if len(together) < len(alike):
                known = {id(shard) for shard, _, _ in together}
                for cut in alike:
                    if id(cut[0]) not in known:
                        _single(cut, group)


def _grouped(items: list[T], kinds: list[K]) -> Iterable[tuple[K, list[T]]]:
    """The items by their kinds; most often all are of one, and need no look-up each."""
    if not kinds or kinds.count(kinds[0]) == len(kinds):
        return [(kind, items) for kind in kinds[:1]]
    groups: dict[K, list[T]] = {}
    for item, kind in zip(items, kinds, strict=True):
        groups.setdefault(kind, []).append(item)
    return groups.items()


PLAIN = PlainGather()


def start(shards: Iterable[Shard], serves: GatherFor = GatherFor.ACCESS) -> None:
    """Begin to make these whole, whether or not they are, each in its own way."""
    shards = [shard for shard in shards if not shard.alone]
    for shard in shards:
        if shard.late is not None:
            shard.settle()
    for way, alike in _grouped(shards, [shard.gather or PLAIN for shard in shards]):
        way.start(alike, serves)


def finish(shards: Iterable[Shard]) -> None:
    """Wait for what was started; the parameters are whole then, and lie in the memory that was filled."""
    waited: Pending[Any] | None = None
    for shard in shards:
        if shard.pending is not waited or shard.near is not None:
            waited = shard.pending
            shard.arrive()
        if not shard.whole:
            show(shard.param, shard.full)
            shard.whole = True
        shard.pending = shard.staged = None


def gather(shards: Sequence[Shard], serves: GatherFor = GatherFor.ACCESS) -> None:
    """Make these whole now."""
    start(shards, serves)
    finish(shards)


@torch.no_grad()
def spread(shards: Sequence[Shard], source: int = 0) -> None:
    """Let every rank cut what one of those that hold them has as the whole parameters; all of them are whole."""
    for shard in shards:
        shard.reclaim()
    cut = [shard for shard in shards if not shard.alone]
    for axis, alike in _grouped(cut, [shard.axis for shard in cut]):
        replicas, flats = alike[0].replicas, [shard.flat for shard in alike]
        with comm.labelled(f"{alike[0].name} … {alike[-1].name}"):
            if replicas is not None:  # first to the rank at the same place of each group, which gives it to its own
                broadcast_coalesced(flats, src=replicas.ranks[source // axis.size], group=replicas.group)
            broadcast_coalesced(flats, src=axis.ranks[source % axis.size], group=axis.group)
    for shard in shards:
        shard.store()


def release(shards: Iterable[Shard]) -> None:
    """Let go of those that no use holds and that need not stay whole."""
    for shard in shards:
        if shard.whole and not shard.persistent and not shard.holds:
            shard.release()


def _backend(group: Any) -> str:
    found = _backends.get(group)
    if found is None:
        found = _backends[group] = played_backend(group)
    return found


def _label(cuts: Sequence[Cut]) -> str:
    return f"{cuts[0][0].name} … {cuts[-1][0].name}"


def _rows(cut: Cut) -> Tensor:
    """The memory of the whole parameter, a row for each rank's part."""
    shard, axis, _ = cut
    return shard.rows if axis is shard.axis else shard.flat.view(axis.size, -1)


def _single(cut: Cut, group: Any) -> None:
    """Straight into the memory of the whole parameter."""
    shard, _, sent = cut
    shard.allocate()
    large = sent.nbytes >= _WORTH_SPARING and _backend(group) == "gloo"
    with comm.labelled(shard.name):
        if large and shard.device.type == "cpu":
            work = gather_parts(shard.flat, sent, group=group, async_op=True)
        else:
            work = comm.all_gather_into_tensor(shard.flat, sent, group=group, async_op=True)
    shard.pending = Pending(None, work)


def _batched(cuts: Sequence[Cut], group: Any) -> None:
    """One operation that the backend makes of many, straight into the memory of the whole parameters."""
    for shard, _, _ in cuts:
        if not shard.filled:
            shard.allocate()
    with comm.labelled(_label(cuts)):
        work = all_gather_lines([shard.flat for shard, _, _ in cuts], [sent for _, _, sent in cuts], group)
    shared: Pending[Any] = Pending(None, work)
    for shard, _, _ in cuts:
        shard.pending = shared


def _packed(cuts: Sequence[Cut], axis: AxisGroup, hops: NodeHops | None = None) -> None:
    """One operation over parts side by side; parameters get their memory when it is through."""
    sizes = [sent.numel() for _, _, sent in cuts]
    world = axis.size
    with comm.labelled(_label(cuts)):
        came = gather_rows(torch.cat([sent for _, _, sent in cuts]), axis, hops)

    def unpack(rows: Tensor) -> Tensor:
        mine = [cut for cut in cuts if cut[0].pending is shared]  # others were gathered again since
        for shard, _, _ in mine:
            shard.allocate()
        parts = rows.view(world, -1)
        with torch.no_grad():
            if len(mine) == len(cuts):
                torch.split_with_sizes_copy(parts, sizes, dim=1, out=[*map(_rows, cuts)])
            else:
                for cut, part in zip(cuts, parts.split(sizes, dim=1), strict=True):
                    if cut[0].pending is shared:
                        _rows(cut).copy_(part)
        return rows.new_empty(0)

    shared = Pending(came.result, came, unpack)
    for shard, _, _ in cuts:
        shard.pending = shared


def _by_all_reduce(cut: Cut) -> Pending[Any]:
    shard, axis, sent = cut
    shard.allocate()
    in_use = shard.whole
    at: Tensor = torch.zeros_like(shard.flat) if in_use else shard.flat.zero_()
    at.view(axis.size, -1)[axis.rank].copy_(sent)
    with comm.labelled(shard.name):
        work = comm.all_reduce(at, group=axis.group, async_op=True)
    return Pending(at, work, shard.flat.copy_ if in_use else None)
