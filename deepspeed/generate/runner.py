"""One forward of a step: packed, run eagerly or as a graph of its padded shape, logits where they are wanted."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.generate.batch import Batch, BatchShape, BlockTables
from deepspeed.generate.cache import PagedCache
from deepspeed.generate.entry import ModelEntry
from deepspeed.generate.graphs import GraphPool
from deepspeed.generate.scheduler import ScheduledWork
from deepspeed.log import logger

_MOST_GRAPHS = 48
_MOST_BATCHES = 64
_TOKENS = (64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048)
"""Padded sizes of steps with prompts."""
_SEQUENCES = (8, 32, 64, 128, 256, 512, 1024)


def padded_sequences(count: int, most: int) -> int:
    """How many sequences a decode step is padded to."""
    if count <= 4:
        return min(1 << (count - 1).bit_length(), most)
    step = 8 if count <= 64 else 16 if count <= 256 else 32
    return min(-(-count // step) * step, most)


class Runner:
    """Runs batches of one model; holds the static tensors, the graphs, and the ids that are still on the device."""

    def __init__(self, entry: ModelEntry, cache: PagedCache, places: int, table_width: int, *, graphs: bool) -> None:
        self._entry, self._cache = entry, cache
        self._width = table_width
        self._most_sequences = places
        self._batches: OrderedDict[tuple[BatchShape, int], Batch] = OrderedDict()
        self._turn = 0
        self._graphs = GraphPool(_MOST_GRAPHS) if graphs and entry.captured else None
        self.pending = torch.zeros(places, dtype=torch.int64, device=cache.device)
        """The last sampled id of each place."""
        self.tables = BlockTables(len(cache.plan.groups), places, table_width)
        self.eager_reason: str | None = None
        """Why graphs were given up."""

    def run(
        self, work: Sequence[ScheduledWork], places: Sequence[int], wanted: Sequence[int], targets: Sequence[int]
    ) -> tuple[Tensor, Batch]:
        """Logits [at least wanted, vocabulary] of these tokens of the row; later runs may overwrite them.

        The ids that the first of them give belong to the places `targets`.
        """
        for each, place in zip(work, places, strict=True):
            self.tables.update(place, each.sequence.blocks)
        shape, static = self._shape(work, len(wanted))
        batch = self._batch(shape)
        batch.fill(work, places, self.tables.arrays, self._cache.block_size)
        batch.want(wanted, targets)
        batch.send()
        if not static or self._graphs is None:
            return self._forward(batch), batch
        try:
            logits: Tensor = self._graphs.run((shape, id(batch)), lambda: self._forward(batch))
            return logits, batch
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._give_up(str(error))
            return self._forward(batch), batch

    @torch.no_grad()
    def _forward(self, batch: Batch) -> Tensor:
        ids = torch.where(batch.ids < 0, self.pending[batch.sources], batch.ids)
        return self._entry.logits(batch, ids, self._cache)

    def _shape(self, work: Sequence[ScheduledWork], wanted: int) -> tuple[BatchShape, bool]:
        """The padded shape, and whether it is one of those that are captured."""
        tokens = sum(each.count for each in work)
        if self._graphs is None:
            return BatchShape(tokens, len(work), wanted, max(each.count for each in work)), False
        if tokens == len(work):
            count = padded_sequences(tokens, self._most_sequences)
            return BatchShape(count, count, count, 1), True
        place, row = bisect_left(_TOKENS, tokens), bisect_left(_SEQUENCES, max(len(work), wanted))
        if place == len(_TOKENS) or row == len(_SEQUENCES):
            return BatchShape(tokens, len(work), wanted, max(each.count for each in work)), False
        count, sequences = _TOKENS[place], _SEQUENCES[row]
        queries = 8 if max(each.count for each in work) <= 8 else count
        return BatchShape(count, sequences, sequences, queries), True

    def _batch(self, shape: BatchShape) -> Batch:
        """Two take turns for each shape, so that one is filled while the other's copy may still run."""
        self._turn ^= 1
        key = (shape, self._turn if self._cache.device.type != "cpu" else 0)
        found = self._batches.get(key)
        if found is None:
            found = Batch(shape, len(self._cache.plan.groups), self._width, self._cache.device)
            self._batches[key] = found
            if len(self._batches) > _MOST_BATCHES:
                self._batches.popitem(last=False)
        self._batches.move_to_end(key)
        return found

    def _give_up(self, reason: str) -> None:
        self.eager_reason = reason
        self._graphs = None
        logger.warning("the model cannot be captured in graphs and runs without them, slower: %.300s", reason)

    @property
    def graphs(self) -> int:
        """How many are captured."""
        return 0 if self._graphs is None else len(self._graphs)

    def clear(self) -> None:
        """Drop graphs and static tensors, which know where pages and weights lay."""
        self._batches.clear()
        if self._graphs is not None:
            self._graphs.clear()
