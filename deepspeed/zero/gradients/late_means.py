"""Means of gradients over ranks that hold equal shards, taken once before the step: [Note: late means]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from deepspeed import comm
from deepspeed.zero.gradients.interfaces import BucketEntry


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

    def land(self) -> None:
        """Wait for it and make it the gradients."""
        if self._work is not None:
            self._work.wait()
        self._flat.div_(self._copies)
        parts = self._flat.split([piece.master.numel() for piece in self._pieces])
        for piece, part in zip(self._pieces, parts, strict=True):
            piece.put_gradient(part, self._accumulate)
