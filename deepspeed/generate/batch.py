"""What one forward reads: a step of the scheduler as static tensors, filled by one copy from host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from deepspeed.generate.scheduler import ScheduledWork

_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How large the tensors of a forward are; what is computed may be less."""

    tokens: int
    sequences: int
    logits: int
    """Rows of logits."""
    most_queries: int
    """Of one sequence."""


class PackedTensors:
    """Named tensors in one piece of the device, filled by one copy from host memory.

    Two pieces of host memory take turns: one is written while the copy of the other may not have run yet.
    """

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (dtype, shape) in fields.items()}
        total = sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values())
        there = device.type != "cpu"
        self._pieces = [torch.zeros(total, dtype=torch.uint8, pin_memory=there) for _ in range(2 if there else 1)]
        self._device = torch.zeros(total, dtype=torch.uint8, device=device) if there else self._pieces[0]
        self._views: list[dict[str, numpy.ndarray]] = [{} for _ in self._pieces]
        self.tensors: dict[str, Tensor] = {}
        begin = 0
        for name, (dtype, shape) in fields.items():
            piece = slice(begin, begin + sizes[name])
            for views, memory in zip(self._views, self._pieces, strict=True):
                views[name] = memory[piece].view(dtype).view(shape).numpy()
            self.tensors[name] = self._device[piece].view(dtype).view(shape)
            begin += -(-sizes[name] // _ALIGNED) * _ALIGNED
        self._turn = 0

    @property
    def host(self) -> dict[str, numpy.ndarray]:
        """What the host may write now, by name."""
        return self._views[self._turn]

    def send(self) -> None:
        """Copy what the host wrote."""
        written = self._pieces[self._turn]
        if written is not self._device:
            self._device.copy_(written, non_blocking=True)
            self._turn ^= 1


class Batch:
    """The tensors of one shape: ids and positions of a row of tokens, and where their keys and values lie."""

    def __init__(self, shape: BatchShape, groups: int, table_width: int, device: torch.device) -> None:
        self.shape = shape
        tokens, sequences = shape.tokens, shape.sequences
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "ids": (torch.int64, (tokens,)),  # -1: still on the device
            "sources": (torch.int64, (tokens,)),  # the row of `pending` that knows an id of -1
            "positions": (torch.int64, (tokens,)),
            "long": (torch.bool, (tokens,)),  # of sequences beyond a short context
            "slots": (torch.int64, (groups, tokens)),
            "wanted": (torch.int64, (shape.logits,)),  # tokens whose logits are computed
            "targets": (torch.int64, (shape.logits,)),  # rows of `pending` that sampled ids go to
            "tables": (torch.int32, (groups, sequences, table_width)),
            "starts": (torch.int32, (sequences + 1,)),
            "lengths": (torch.int32, (sequences,)),
        }
        self._packed = PackedTensors(fields, device)
        held = self._packed.tensors
        self.ids, self.sources, self.positions = held["ids"], held["sources"], held["positions"]
        self.long, self.slots, self.tables = held["long"], held["slots"], held["tables"]
        self.starts, self.lengths, self.wanted = held["starts"], held["lengths"], held["wanted"]
        self.targets = held["targets"]
        self.counts: tuple[int, ...] = ()
        """Tokens of each sequence, as the host knows them."""
        self.contexts: tuple[int, ...] = ()
        """Tokens of each sequence in the cache, after this forward."""

    def fill(
        self, work: Sequence[ScheduledWork], rows: Sequence[int], tables: Sequence[numpy.ndarray], block_size: int
    ) -> None:
        """Write a step's work; `rows` are the places of its sequences in `tables` [places, width] of each group."""
        host = self._packed.host
        counts = numpy.array([each.count for each in work], numpy.int64)
        starts = numpy.array([each.start for each in work], numpy.int64)
        ends = numpy.cumsum(counts)
        total = int(ends[-1])
        places = numpy.asarray(rows, numpy.int64)
        owner = numpy.repeat(numpy.arange(len(work)), counts)
        positions = numpy.arange(total) + (starts - ends + counts)[owner]
        if total == len(work):
            ids = [known[each.start] if each.start < len(known := each.sequence.tokens) else -1 for each in work]
        else:
            ids = [token for each in work for token in _ids(each)]
        host["ids"][:total], host["ids"][total:] = ids, 0
        host["sources"][:total], host["sources"][total:] = places[owner], 0
        host["positions"][:total], host["positions"][total:] = positions, 0
        host["long"][:total], host["long"][total:] = numpy.array([each.sequence.long for each in work])[owner], False
        host["starts"][0], host["starts"][1 : len(work) + 1], host["starts"][len(work) + 1 :] = 0, ends, total
        host["lengths"][: len(work)], host["lengths"][len(work) :] = starts + counts, 0
        for group, table in enumerate(tables):
            mine = table[places]
            width = mine.shape[1]
            host["tables"][group, : len(work), :width] = mine
            blocks = mine[owner, positions // block_size].astype(numpy.int64)
            slots = host["slots"][group]
            slots[:total] = numpy.where(blocks < 0, -1, blocks * block_size + positions % block_size)
            slots[total:] = -1
        self.counts, self.contexts = tuple(counts.tolist()), tuple((starts + counts).tolist())

    def want(self, indices: Sequence[int], targets: Sequence[int]) -> None:
        """Say of which tokens logits are needed, and where the ids go that the first of them give."""
        wanted, rows = self._packed.host["wanted"], self._packed.host["targets"]
        wanted[: len(indices)], wanted[len(indices) :] = indices, 0
        rows[: len(targets)], rows[len(targets) :] = targets, 0

    def clear(self) -> None:
        """Write a step of nothing: no token has a slot."""
        for name, values in self._packed.host.items():
            values.fill(-1 if name == "slots" else 0)

    def send(self) -> None:
        """Copy everything to the device."""
        self._packed.send()


def _ids(work: ScheduledWork) -> list[int]:
    """Known tokens, then drafts; -1 where the last one is not known to the host yet."""
    known = work.sequence.tokens[work.start : work.start + work.count]
    if len(known) < work.count:
        known = known + list(work.drafts)
    return known + [-1] * (work.count - len(known))


class BlockTables:
    """The blocks of sequences as arrays, one row for each sequence with a place; rows change where blocks did."""

    def __init__(self, groups: int, places: int, width: int) -> None:
        self.arrays = [numpy.full((places, width), -1, numpy.int32) for _ in range(groups)]
        self._known: list[dict[int, list[int]]] = [{} for _ in range(groups)]

    def update(self, work: Sequence[ScheduledWork], places: Sequence[int]) -> None:
        """Let the rows of these places say what the blocks of their sequences are now."""
        for group, (array, known) in enumerate(zip(self.arrays, self._known, strict=True)):
            for each, place in zip(work, places, strict=True):
                now = each.sequence.blocks[group]
                if known.get(place) != now:
                    array[place, : len(now)] = now
                    array[place, len(now) :] = -1
                    known[place] = now.copy()
