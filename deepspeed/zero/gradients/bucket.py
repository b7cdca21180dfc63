"""Gradients that travel together: how they are laid out for the ranks that own parts of them, and where they land."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.zero.gradients.reduction import Even, Everything, Owned, Reduction, Share
from deepspeed.zero.states.piece import Piece

__all__ = ["Bucket", "Cut", "Parcel", "Part", "as_flat"]

# Slices of all ranks whose sizes differ by less than this are padded to one size, which backends can scatter.
_PADDING = 1.25


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a parameter, and the rank that owns them."""

    owner: int
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class Parcel:
    """The gradient of one parameter, as the way to its owners sees it."""

    name: str
    param: nn.Parameter
    numel: int
    take: Callable[[], Tensor | None]
    """Fetches the whole gradient, which is forgotten where it was."""
    piece: Piece | None
    """What this rank owns of the parameter."""
    reduction: Reduction
    dtype: torch.dtype
    """In which it travels."""
    accumulate: torch.dtype
    """In which the owner adds gradients up."""
    device: torch.device
    chunk: int = 0
    """Where every rank owns so many elements, in the order of the ranks; else the next two tell."""
    rows: int = 0
    """How long its first dimension is, where there is a chunk."""
    owners: range = range(0)
    interval: Callable[[int], tuple[int, int]] | None = None
    """The elements that an owner has."""

    @property
    def kind(self) -> Hashable:
        """Parcels of one kind may share a bucket."""
        return id(self.reduction), self.dtype, self.accumulate, self.device, bool(self.chunk)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the gradient of one piece lies in what this rank receives."""

    piece: Piece
    start: int
    stop: int


class Bucket:
    """Parcels that travel as one flat tensor, the slices of each owner side by side."""

    def __init__(self, parcels: Sequence[Parcel]) -> None:
        self.parcels = list(parcels)
        first = self.parcels[0]
        self.reduction, self.dtype, self.accumulate = first.reduction, first.dtype, first.accumulate
        self.device = first.device
        self._world, self._rank = first.reduction.size, first.reduction.rank
        self.share: Share
        self.cuts: list[Cut] = []
        self._order: list[tuple[int, Part]] = []
        self._line = False
        self._even = bool(first.chunk)
        self._by_rows: list[bool] = []
        self._places: list[tuple[int, int]] = []
        self._pads: dict[int, int] = {}
        if self._even:
            self._lay_even()
        else:
            self._lay_owned()

    @property
    def label(self) -> str:
        """What errors and logs call it."""
        first, last = self.parcels[0].name, self.parcels[-1].name
        return f"gradients of {last}" + (f" … {first}" if first != last else "")

    @property
    def nbytes(self) -> int:
        """Bytes of all its gradients on their way."""
        return sum(parcel.numel for parcel in self.parcels) * self.dtype.itemsize

    def pack(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Lay gradients out flat, the slice of the first owner first; zeros stand for absent ones."""
        if self._even:
            return self._pack_even(grads)
        flats = self._flat(grads)
        if self._line:
            return flats[0] if len(flats) == 1 else torch.cat(flats)
        if len(flats) == 1 and not self._pads:
            return flats[0]
        lines: list[Tensor] = []
        for owner, run in groupby(self._order, key=lambda item: item[1].owner):
            lines += [flats[place][part.start : part.stop] for place, part in run]
            if self._pads.get(owner):
                lines.append(torch.zeros(self._pads[owner], dtype=self.dtype, device=self.device))
        return torch.cat(lines)

    def _flat(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        return [
            as_flat(grad, parcel.numel, self.dtype, self.device)
            for parcel, grad in zip(self.parcels, grads, strict=True)
        ]

    def _pack_even(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Every rank owns a chunk of each; one whose rows can be dealt out evenly is cut as it is."""
        if len(grads) == 1:
            flat = as_flat(grads[0], self.parcels[0].numel, self.dtype, self.device)
            if flat.numel() == self.parcels[0].chunk * self._world:
                return flat
            return torch._chunk_cat([flat], 0, self._world).view(-1)
        dense, dtype = torch.strided, self.dtype
        as_they_are = [
            grad
            if grad is not None and by_rows and grad.dtype == dtype and grad.layout == dense and grad.is_contiguous()
            else as_flat(grad, parcel.numel, dtype, self.device)
            for parcel, grad, by_rows in zip(self.parcels, grads, self._by_rows, strict=True)
        ]
        return torch._chunk_cat(as_they_are, 0, self._world).view(-1)

    def land(self, mine: Tensor) -> None:
        """Add what came to the pieces of this rank; not seen by autograd."""
        if not self.cuts:
            return
        if self._line:  # all of it came; what others own goes
            mine = torch.cat([mine[start:stop] for start, stop in self._places])
        staying = [cut for cut in self.cuts if cut.piece.arena is None]
        leaving = [(cut.piece, mine[cut.start : cut.stop]) for cut in self.cuts if cut.piece.arena is not None]
        if staying:
            self._add(staying, mine)
        if leaving:
            _carry(leaving, self.accumulate)

    def _add(self, cuts: Sequence[Cut], mine: Tensor) -> None:
        """To pieces whose gradients stay where their parameters are."""
        if mine.dtype != self.accumulate:
            mine = mine.to(self.accumulate)
        if cuts[0].piece.home is None and mine.untyped_storage().nbytes() > mine.nbytes:
            mine = mine.clone()  # a slice of what was sent; the rest of it is not needed any more
        olds: list[Tensor] = []
        added: list[Tensor] = []
        homes: list[Tensor] = []
        moved: list[Tensor] = []
        for cut, part in zip(cuts, _parts(mine, cuts), strict=True):
            piece = cut.piece
            if piece.gradient is not None:
                olds.append(piece.gradient)
                added.append(part)
            elif piece.home is None:
                piece.gradient = part
            else:
                homes.append(piece.home)
                moved.append(part)
                piece.gradient = piece.home
        if moved:
            torch._foreach_copy_(homes, moved)
        if added:
            torch._foreach_add_(olds, added)

    @property
    def leaves(self) -> bool:
        """True if some of it lands in host memory, of which the device alone knows when it is there."""
        return any(cut.piece.home is not None and cut.piece.home.device != self.device for cut in self.cuts)

    def _lay_even(self) -> None:
        at = 0
        for parcel in self.parcels:
            self._by_rows.append(parcel.rows > 0 and parcel.rows % self._world == 0)
            if parcel.piece is not None:
                self.cuts.append(Cut(parcel.piece, at, at + parcel.piece.master.numel()))
            at += parcel.chunk
        self.share = Even(at)

    def _lay_owned(self) -> None:
        if any(len(parcel.owners) > self.reduction.few for parcel in self.parcels):
            self._lay_line()
            return
        order = [
            (place, Part(owner, *_interval(parcel, owner)))
            for place, parcel in enumerate(self.parcels)
            for owner in parcel.owners
        ]
        if len({part.owner for _, part in order}) > self.reduction.few:
            self._lay_line()
            return
        self._order = sorted(order, key=lambda item: item[1].owner)
        lengths: dict[int, int] = {}
        for place, part in self._order:
            if part.owner == self._rank:
                piece, at = self.parcels[place].piece, lengths.get(part.owner, 0)
                assert piece is not None, "a rank that owns elements has a piece of them"
                self.cuts.append(Cut(piece, at, at + part.stop - part.start))
            lengths[part.owner] = lengths.get(part.owner, 0) + part.stop - part.start
        longest = max(lengths.values())
        if len(lengths) == self._world and longest * self._world <= _PADDING * sum(lengths.values()):
            self._pads = {owner: longest - length for owner, length in lengths.items() if length < longest}
            self.share = Even(longest)
        else:
            self.share = Owned(tuple(lengths.items()))

    def _lay_line(self) -> None:
        """So many ranks own parts that all get all of it: gradients lie one after the other, as they are."""
        self._line, self.share = True, Everything()
        begin = at = 0
        for parcel in self.parcels:
            if parcel.piece is not None:
                start, stop = _interval(parcel, self._rank)
                self._places.append((begin + start, begin + stop))
                self.cuts.append(Cut(parcel.piece, at, at + stop - start))
                at += stop - start
            begin += parcel.numel


def _parts(mine: Tensor, cuts: Sequence[Cut]) -> Sequence[Tensor]:
    """What each piece gets of it; by one operation where they lie side by side."""
    sizes, at = [], 0
    for cut in cuts:
        if cut.start != at:
            return [mine[cut.start : cut.stop] for cut in cuts]
        sizes.append(cut.stop - at)
        at = cut.stop
    parts: Sequence[Tensor] = mine[:at].split(sizes)
    return parts


def _carry(leaving: Sequence[tuple[Piece, Tensor]], accumulate: torch.dtype) -> None:
    """Off the device, added to what came before, and measured on the way; all of it queued, none of it waited for.

    The device adds: what came before travels to it and back beside the backward, in both directions at once, while a
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


def _interval(parcel: Parcel, owner: int) -> tuple[int, int]:
    assert parcel.interval is not None, "a parcel without a chunk knows its owners"
    return parcel.interval(owner)


def as_flat(grad: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A gradient as a dense 1-D tensor of `dtype`; zeros where there is none."""
    if grad is None:
        return torch.zeros(numel, dtype=dtype, device=device)
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    flat: Any = grad.view(-1) if grad.is_contiguous() else grad.reshape(-1)
    return flat if flat.dtype == dtype else flat.to(dtype)  # type: ignore[no-any-return]
