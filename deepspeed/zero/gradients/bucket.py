"""Gradients that travel together: their layout for the ranks that own parts, buckets in flight, and their sums.

The oldest bucket is unpacked before another one is packed. On a device packing happens on the stream that computes,
reduction and unpacking on a second one; the memory of a bucket returns when the first has waited for its unpacking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator.side_stream import SideStream
from deepspeed.comm import Pending
from deepspeed.zero.gradients.interfaces import BucketEntry
from deepspeed.zero.gradients.reduction import EvenShares, OwnedShares, Share, SharePart, WholeShares
from deepspeed.zero.parameters.data import plain_access
from deepspeed.zero.piece import StatePiece

# Slices of all ranks whose sizes differ by less than this are padded to one size, which backends can scatter.
_PADDING = 1.25


Cut = tuple[StatePiece, slice]
"""A piece, and where its gradient lies in what this rank receives."""


class Bucket:
    """Entries that travel as one flat tensor, the slices of each owner side by side."""

    def __init__(self, entries: Sequence[BucketEntry]) -> None:
        self.entries = list(entries)
        first = self.entries[0]
        self.reduction, self.dtype, self.accumulate = first.reduction, first.dtype, first.accumulate
        self.device = first.device
        self._world, self._rank = first.reduction.size, first.reduction.rank
        self.share: Share
        self.cuts: list[Cut] = []
        self._runs: list[tuple[int, list[tuple[int, slice]]]] = []
        """Owners, each with the (place of an entry, its elements of it), as they lie in what is sent."""
        self._ids = [id(entry.param) for entry in entries]
        self._line = False
        self._even = bool(first.chunk)
        self._by_rows: list[bool] = []
        self._places: list[slice] = []
        self._pads: dict[int, int] = {}
        if self._even:
            self._lay_even()
        else:
            self._lay_owned()

    @property
    def nbytes(self) -> int:
        """Bytes of all its gradients on their way."""
        return sum(entry.numel for entry in self.entries) * self.dtype.itemsize

    def pack(self) -> tuple[Tensor, list[int]]:
        """Take the gradients and lay them out flat; and the ids of the parameters that have some."""
        with plain_access():
            grads = [entry.take() if entry.take is not None else None for entry in self.entries]
        had = [each for each, grad in zip(self._ids, grads, strict=True) if grad is not None]
        return self._lay(grads), had

    def _lay(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The slice of the first owner first; zeros stand for absent ones."""
        if self._even:
            return self._pack_even(grads)
        flats = [
            as_flat(grad, entry.numel, self.dtype, self.device) for entry, grad in zip(self.entries, grads, strict=True)
        ]
        if self._line:
            return flats[0] if len(flats) == 1 else torch.cat(flats)
        if len(flats) == 1 and not self._pads:
            return flats[0]
        lines: list[Tensor] = []
        for owner, run in self._runs:
            lines += [flats[place][part] for place, part in run]
            if self._pads.get(owner):
                lines.append(torch.zeros(self._pads[owner], dtype=self.dtype, device=self.device))
        return torch.cat(lines)

    def _pack_even(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Every rank owns a chunk of each; one whose rows can be dealt out evenly is cut as it is."""
        if len(grads) == 1:
            flat = as_flat(grads[0], self.entries[0].numel, self.dtype, self.device)
            if flat.numel() == self.entries[0].chunk * self._world:
                return flat
            return torch._chunk_cat([flat], 0, self._world).view(-1)
        dense, dtype = torch.strided, self.dtype
        as_they_are = [
            grad
            if grad is not None and by_rows and grad.dtype == dtype and grad.layout == dense and grad.is_contiguous()
            else as_flat(grad, entry.numel, dtype, self.device)
            for entry, grad, by_rows in zip(self.entries, grads, self._by_rows, strict=True)
        ]
        return torch._chunk_cat(as_they_are, 0, self._world).view(-1)

    def unpack(self, mine: Tensor) -> None:
        """Add what came to the pieces of this rank; not seen by autograd."""
        if not self.cuts:
            return
        if self._line:  # all of it came; what others own goes
            mine = torch.cat([mine[part] for part in self._places])
        staying = [cut for cut in self.cuts if cut[0].arena is None]
        leaving = [(piece, mine[part]) for piece, part in self.cuts if piece.arena is not None]
        if staying:
            self._add(staying, mine)
        if leaving:
            _carry(leaving, self.accumulate)

    def _add(self, cuts: Sequence[Cut], mine: Tensor) -> None:
        """To pieces whose gradients stay where their parameters are."""
        if mine.dtype != self.accumulate:
            mine = mine.to(self.accumulate)
        if cuts[0][0].home is None and mine.untyped_storage().nbytes() > mine.nbytes:
            mine = mine.clone()  # a slice of what was sent; the rest of it is not needed any more
        came = [(piece, part) for (piece, _), part in zip(cuts, _parts(mine, cuts), strict=True)]
        added = [(piece.gradient, part) for piece, part in came if piece.gradient is not None]
        moved = [(piece.home, part) for piece, part in came if piece.gradient is None and piece.home is not None]
        for piece, part in came:
            if piece.gradient is None:
                piece.gradient = part if piece.home is None else piece.home
        if moved:
            torch._foreach_copy_([home for home, _ in moved], [part for _, part in moved])
        if added:
            torch._foreach_add_([old for old, _ in added], [part for _, part in added])

    @property
    def leaves(self) -> bool:
        """True if some of it goes to host memory, of which the device alone knows when it is there."""
        return any(piece.home is not None and piece.home.device != self.device for piece, _ in self.cuts)

    def _lay_even(self) -> None:
        at, parts = 0, []
        for entry in self.entries:
            parts.append(SharePart(entry.name, at, entry.chunk))
            self._by_rows.append(entry.rows > 0 and entry.rows % self._world == 0)
            if entry.piece is not None:
                self.cuts.append((entry.piece, slice(at, at + entry.piece.master.numel())))
            at += entry.chunk
        self.share = EvenShares(at, (tuple(parts),))

    def _lay_owned(self) -> None:
        if any(len(entry.owners) > self.reduction.few for entry in self.entries):
            self._lay_line()
            return
        order = [
            (owner, place, slice(*_interval(entry, owner)))
            for place, entry in enumerate(self.entries)
            for owner in entry.owners
        ]
        if len({owner for owner, _, _ in order}) > self.reduction.few:
            self._lay_line()
            return
        order.sort(key=lambda item: item[0])
        runs = groupby(order, key=lambda item: item[0])
        self._runs = [(owner, [(place, part) for _, place, part in run]) for owner, run in runs]
        lengths: dict[int, int] = {}
        parts: dict[int, list[SharePart]] = {}
        for owner, place, part in order:
            at = lengths.get(owner, 0)
            parts.setdefault(owner, []).append(SharePart(self.entries[place].name, at, part.stop - part.start))
            lengths[owner] = at + part.stop - part.start
            if owner == self._rank:
                piece = self.entries[place].piece
                assert piece is not None, "a rank that owns elements has a piece of them"
                self.cuts.append((piece, slice(at, lengths[owner])))
        longest, lying = max(lengths.values()), tuple(map(tuple, parts.values()))
        if len(lengths) == self._world and longest * self._world <= _PADDING * sum(lengths.values()):
            self._pads = {owner: longest - length for owner, length in lengths.items() if length < longest}
            self.share = EvenShares(longest, lying)
        else:
            self.share = OwnedShares(tuple(lengths.items()), lying)

    def _lay_line(self) -> None:
        """So many ranks own parts that all get all of it: gradients lie one after the other, as they are."""
        self._line, self.share = True, WholeShares()
        begin = at = 0
        for entry in self.entries:
            if entry.piece is not None:
                start, stop = _interval(entry, self._rank)
                self._places.append(slice(begin + start, begin + stop))
                self.cuts.append((entry.piece, slice(at, at + stop - start)))
                at += stop - start
            begin += entry.numel


def label(entries: Sequence[BucketEntry]) -> str:
    """What errors and logs call gradients that travel together."""
    first, last = entries[0].name, entries[-1].name
    return f"gradients of {last}" + (f" … {first}" if first != last else "")


def _parts(mine: Tensor, cuts: Sequence[Cut]) -> Sequence[Tensor]:
    """What each piece gets of it; by one operation where they lie side by side."""
    sizes = [part.stop - part.start for _, part in cuts]
    ends = list(accumulate(sizes))
    if ends != [part.stop for _, part in cuts]:
        return [mine[part] for _, part in cuts]
    parts: Sequence[Tensor] = mine[: ends[-1]].split(sizes)
    return parts


def _carry(leaving: Sequence[tuple[StatePiece, Tensor]], accumulate: torch.dtype) -> None:
    """Off the device, added to what came before, and measured on the way; all of it queued, none of it waited for.

    The device adds: what came before travels to it and back during the backward, in both directions at once, while a
    sum in host memory would wait for the copy first.
    """
    totals: list[Tensor] = []
    copies: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for piece, part in leaving:
        assert piece.arena is not None, "only such pieces leave"
        assert piece.home is not None, "an arena has memory for gradients"
        piece.arena.settle()
        if piece.gradient is not None:
            piece.arena.widen(accumulate)
            part = piece.gradient.to(part.device, accumulate, non_blocking=True).add_(part)
        totals.append(part)
        if part is not piece.home:
            homes, values = copies.setdefault(piece.home.device, ([], []))
            homes.append(piece.home)
            values.append(part)
    for homes, values in copies.values():
        torch._foreach_copy_(homes, values, non_blocking=True)
    afar = totals[0].device.type != "cpu"
    norms = torch._foreach_norm(totals, 2, torch.float32) if afar else [None] * len(totals)
    for (piece, _), total, norm in zip(leaving, totals, norms, strict=True):
        piece.gradient, piece.norm = piece.home, norm
        if piece.chosen is not None:
            piece.picked = total.view(-1)[piece.chosen]


def _interval(entry: BucketEntry, owner: int) -> tuple[int, int]:
    assert entry.interval is not None, "a entry without a chunk knows its owners"
    return entry.interval(owner)


def as_flat(grad: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A gradient as a dense 1-D tensor of `dtype`; zeros where there is none."""
    if grad is None:
        return torch.zeros(numel, dtype=dtype, device=device)
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    flat: Any = grad.view(-1) if grad.is_contiguous() else grad.reshape(-1)
    return flat if flat.dtype == dtype else flat.to(dtype)  # type: ignore[no-any-return]


_LARGE = 128 << 20  # bytes of a bucket of which one in flight keeps any link busy


@dataclass(eq=False, slots=True)
class _SentBucket:
    bucket: Bucket
    memory: Tensor
    """What was sent; kept until the stream that packed it has waited for the unpacking."""
    pending: Pending[Tensor] | None
    flags: Pending[Tensor] | None = None
    """What ranks say of its gradients; see `BucketsInFlight`."""
    unpacked: Any = None
    """The device's event after unpacking."""


class BucketsInFlight:
    """Sends buckets and unpacks what comes back, in order."""

    def __init__(self, reduced: Callable[[Bucket, Pending[Tensor]], None]) -> None:
        """`reduced` is called with each bucket that has arrived and of which ranks were asked something."""
        self._reduced = reduced
        self._buckets: list[Bucket] = []
        self._in_flight: deque[_SentBucket] = deque()
        self._side_stream: dict[torch.device, SideStream] = {}
        self._carried: Any = None
        """The device's event after the last unpacking into host memory that was not waited for."""

    def carry(self, buckets: Sequence[Sequence[BucketEntry]]) -> None:
        """These leave from now on."""
        self._buckets = [Bucket(entries) for entries in buckets]

    def send(self, place: int, ask: Callable[[], Pending[Tensor] | None]) -> list[int]:
        """A bucket leaves for its owners; returns the ids of the parameters of which there was a gradient.

        `ask` is called when it is packed; what it returns is the answer to what ranks were asked of the bucket.
        """
        bucket = self._buckets[place]
        allowed = 1 if bucket.device.type == "cpu" or bucket.nbytes > _LARGE else 2
        while len(self._in_flight) >= allowed:
            self._finish_oldest()
        packed, had = bucket.pack()
        flags = ask()
        side = self._side_stream.get(bucket.device)
        if side is None:
            side = self._side_stream[bucket.device] = SideStream(bucket.device)
        with comm.labelled(label(bucket.entries)), side:
            sent = _SentBucket(bucket, packed, bucket.reduction.start(packed, bucket.share), flags)
            if side.device:
                self._unpack(sent)
                sent.unpacked = side.record()
                if bucket.leaves:
                    self._carried = sent.unpacked
        self._in_flight.append(sent)
        return had

    @torch.no_grad()
    def wait(self) -> None:
        """All that was sent lies with its owners; what left the device is there for the host to read."""
        while self._in_flight:
            self._finish_oldest()
        if self._carried is not None:
            self._carried.synchronize()
            self._carried = None

    def drop(self) -> None:
        """After a backward that failed: the others may never come for the rest of it."""
        for sent in self._in_flight:
            if sent.unpacked is not None:
                sent.unpacked.wait()
        self._in_flight.clear()

    def _unpack(self, sent: _SentBucket) -> None:
        pending, sent.pending = sent.pending, None
        if pending is not None:
            sent.bucket.unpack(pending.wait())

    def _finish_oldest(self) -> None:
        sent = self._in_flight.popleft()
        self._unpack(sent)
        if sent.unpacked is not None:
            sent.unpacked.wait()  # the stream that computes waits, not the host
        if sent.flags is not None:
            self._reduced(sent.bucket, sent.flags)


def late_packs(entries: Sequence[BucketEntry], limit: int) -> Iterator[list[BucketEntry]]:
    """Those whose means are to be taken and of which elements lie here, in packs of one kind and about `limit` each."""
    packs: dict[object, list[BucketEntry]] = {}
    for entry in entries:
        if entry.piece is None or entry.reduction.late is None:
            continue
        pack = packs.setdefault(entry.kind, [])
        pack.append(entry)
        if sum(each.piece.master.numel() for each in pack if each.piece is not None) >= limit:
            yield packs.pop(entry.kind)
    yield from packs.values()


class LateMean:
    """One mean on its way, in the dtype in which gradients travel."""

    def __init__(self, entries: Sequence[BucketEntry]) -> None:
        first, axis = entries[0], entries[0].reduction.late
        assert axis is not None, "packs are of those with equal shards elsewhere"
        self._pieces = [entry.piece for entry in entries if entry.piece is not None]
        self._accumulate, self._copies = first.accumulate, axis.size
        parts = [
            torch.zeros(piece.master.numel(), dtype=first.dtype, device=first.device)
            if piece.gradient is None
            else piece.gradient.reshape(-1).to(first.dtype)
            for piece in self._pieces
        ]
        self._flat = torch.cat(parts)
        with comm.labelled(f"gradients of equal shards, {entries[0].name} … {entries[-1].name}"):
            self._work = comm.all_reduce(self._flat, group=axis.group, async_op=True)

    def wait(self) -> None:
        """Wait for it and make it the gradients."""
        if self._work is not None:
            self._work.wait()
        self._flat.div_(self._copies)
        parts = self._flat.split([piece.master.numel() for piece in self._pieces])
        for piece, part in zip(self._pieces, parts, strict=True):
            piece.put_gradient(part, self._accumulate)
