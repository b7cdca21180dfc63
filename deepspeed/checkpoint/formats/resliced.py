"""A checkpoint of tensor-parallel ranks as any other number of them sees it: slices put together, and cut anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.checked_files import Opened
from deepspeed.checkpoint.formats.source import Part, Small, Source, join
from deepspeed.errors import CheckpointError
from deepspeed.fragments import Split

__all__ = ["Resliced", "plain_splits", "splits_in"]

_MOST_INTERVALS = 2**20


def plain_splits(splits: Mapping[str, Split]) -> dict[str, Any]:
    """For a file: name → [dim, intervals by rank]."""
    return {
        name: [split.dim, [[list(part) for part in parts] for parts in split.parts]] for name, split in splits.items()
    }


def splits_in(value: Any, where: object) -> dict[str, Split]:
    """What `plain_splits` wrote; gaps, and overlaps that are no copies, are a CheckpointError about `where`."""
    found = {}
    for name, entry in (value or {}).items():
        try:
            dim, parts = entry
            split = Split(dim, tuple(tuple((start, stop) for start, stop in part) for part in parts))
            pieces = sorted({piece for part in split.parts for piece in part})
            numbers = [dim, *(number for piece in pieces for number in piece)]
            fine = (
                all(type(number) is int and 0 <= number < 2**40 for number in numbers) and len(pieces) < _MOST_INTERVALS
            )
            ends = [0, *(stop for _, stop in pieces)]
            fine = fine and dim < 64 and [start for start, _ in pieces] == ends[:-1] and bool(pieces)
            fine = fine and all(len(set(part)) == len(part) for part in split.parts)
        except (TypeError, ValueError):
            fine = False
        if not fine or not isinstance(name, str):
            raise CheckpointError(f"{where}: how {name!r:.100} is cut over ranks is not readable: {entry!r:.100}")
        found[name] = split
    return found


class Resliced:
    """A `Source` of slices for rank `rank` of other slices; `wanted` is empty for whole tensors.

    What is cut in either of them is read as a whole part of each file that holds some of it; the rest is found as in
    the first source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        saved: Mapping[str, Split],
        wanted: Mapping[str, Split],
        rank: int = 0,
        *,
        same_ranks: bool = False,
    ) -> None:
        """`same_ranks`: a rank is the one that wrote what it reads, so that random states are its own."""
        self._same_ranks = same_ranks
        self._sources, self._saved, self._wanted, self._rank = sources, saved, wanted, rank
        self._first = sources[0]
        for name, split in saved.items():
            if split.ranks != len(sources):
                raise CheckpointError(
                    f"{name} was cut over {split.ranks} tensor-parallel ranks, but there are files of {len(sources)}: "
                    "the checkpoint is not whole"
                )
        self._shapes = {name: self._local_shape(name, shape) for name, shape in self._first.shapes.items()}

    def _local_shape(self, name: str, shape: torch.Size) -> torch.Size:
        whole = self._saved[name].whole_shape(shape) if name in self._saved else tuple(shape)
        wanted = self._wanted.get(name)
        if wanted is None or wanted.dim >= len(whole) or wanted.total != whole[wanted.dim]:
            return torch.Size(whole)  # of another size than the model's: whoever compares shapes finds it
        return torch.Size(wanted.shape(whole, self._rank))

    @property
    def format(self) -> str:
        """A few words on what this is."""
        count = len(self._sources)
        return f"{self._first.format}{f', of {count} tensor-parallel ranks' if count > 1 else ''}"

    @property
    def stage(self) -> int:
        """ZeRO's stage when it was written."""
        return self._first.stage

    @property
    def world(self) -> int:
        """Ranks over which ZeRO sharded."""
        return self._first.world

    @property
    def files(self) -> Sequence[str]:
        """Every file that belongs to it."""
        return self._first.files

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Every parameter and buffer as the wanted rank has it."""
        return self._shapes

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers, which all ranks have alike."""
        return self._first.buffers

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied name → the name in `shapes`."""
        return self._first.aliases

    @property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        """The optimizer's groups."""
        return self._first.groups

    @property
    def small(self) -> Small:
        """What is not a tensor."""
        return self._first.small

    def kinds(self, name: str) -> tuple[str, ...]:
        """What can be read of a parameter."""
        return self._first.kinds(name)

    def dtype(self, name: str) -> torch.dtype | None:
        """What the model computed with."""
        return self._first.dtype(name)

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[Part]:
        """Where the flat elements [start, stop) of the wanted rank's part are; of a cut tensor a copy."""
        owner = self.aliases.get(name, name)
        if owner not in self._saved and owner not in self._wanted:
            return self._first.find(name, kind, start, stop)
        if owner not in self._saved and (run := self._run(owner)) is not None:
            last = run[1] if stop is None else run[0] + stop
            return self._first.find(name, kind, run[0] + start, last)
        flat = self._part(owner, kind).reshape(-1)
        return [Part(flat[start:stop].clone(), _IN_MEMORY)]

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The flat elements [start, stop) of the wanted rank's part."""
        return join(self.find(name, kind, start, stop))

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The optimizer's state of a parameter that has no elements of its own."""
        return self._first.scalars(name)

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """The place in the data; random states belong to the ranks that wrote them."""
        found = self._first.rank_state(rank)
        if self._same_ranks:
            return found
        return {"data": found["data"]} if found.get("data") else {}

    def _run(self, name: str) -> tuple[int, int] | None:
        """The elements of a whole tensor that the wanted rank has, if they lie one behind the other."""
        wanted, shape = self._wanted[name], self._first.shapes[name]
        if wanted.dim or self._shapes[name] == shape or len(wanted.parts[self._rank]) != 1:
            return None
        ((start, stop),) = wanted.parts[self._rank]
        row = shape[1:].numel()
        return start * row, stop * row

    def _part(self, name: str, kind: str) -> Tensor:
        saved, wanted = self._saved.get(name), self._wanted.get(name)
        if saved is None:
            whole = self._first.read(name, kind).view(self._first.shapes[name])
        else:
            parts = [source.read(name, kind).view(source.shapes[name]) for source in self._sources]
            self._check(name, saved, parts)
            whole = saved.join(parts)
        if wanted is None or self._shapes[name] == whole.shape:
            return whole
        return wanted.cut(whole, self._rank)

    def _check(self, name: str, saved: Split, parts: Sequence[Tensor]) -> None:
        whole = saved.whole_shape(parts[0].shape) if saved.dim < parts[0].dim() else ()
        for rank, part in enumerate(parts):
            if not whole or tuple(part.shape) != saved.shape(whole, rank):
                raise CheckpointError(
                    f"{name}: the part of tensor-parallel rank {rank} has the shape {tuple(part.shape)}, which does "
                    "not fit how it was cut: the file is damaged or belongs to another checkpoint"
                )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nowhere(_: Tensor) -> None:
    return None


_IN_MEMORY = Opened(None, _same, _nowhere)
"""Parts that are put together from several files, each checked when it was read."""
