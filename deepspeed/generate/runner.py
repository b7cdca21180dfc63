"""One forward of a step: packed, run eagerly or as a graph of its padded shape, logits where they are wanted."""

from __future__ import annotations

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

_MOST_GRAPHS = 96
_TOKENS = (64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048)
"""Padded sizes of steps with prompts; larger ones are not captured."""
_SEQUENCES = (16, 128, 256, 512, 1024)
"""The same of their sequences."""
_MKL_ROWS = 16
_GUESSED = 8
"""Queries of a sequence in a step that verifies guesses, at most."""


def padded_sequences(count: int, most: int) -> int:
    """How many sequences a decode step is padded to."""
    if count <= 4:
        return min(1 << (count - 1).bit_length(), most)
    step = 8 if count <= 64 else 16 if count <= 256 else 32
    return min(-(-count // step) * step, most)


def _padded(count: int, sizes: Sequence[int]) -> int:
    """The next of the sizes; 0 where there are too many."""
    return next((size for size in sizes if size >= count), 0)


class Runner:
    """Runs batches of one model; holds the static tensors, the graphs, and the ids that are still on the device."""

    def __init__(
        self, entry: ModelEntry, cache: PagedCache, places: int, table_width: int, *, most_tokens: int, graphs: bool
    ) -> None:
        self.entry, self.cache = entry, cache
        self._width = table_width
        self._most_sequences, self._most_tokens = places, most_tokens
        self._batches: OrderedDict[BatchShape, Batch] = OrderedDict()
        self._graphs = GraphPool(_MOST_GRAPHS) if graphs and entry.captured else None
        self._by_mkl = cache.device.type == "cpu" and torch.backends.mkl.is_available()
        self.pending = torch.zeros(places, dtype=torch.int64, device=cache.device)
        """The last sampled id of each place."""
        self.tables = BlockTables(len(cache.plan.groups), places, table_width)
        self._eager: set[bool] = set()
        """Whether each sequence has one query, in steps for which graphs were given up."""

    def run(
        self, work: Sequence[ScheduledWork], places: Sequence[int], wanted: Sequence[int], targets: Sequence[int]
    ) -> tuple[Tensor, Batch]:
        """Logits [at least wanted, vocabulary] of these tokens of the row; later runs may overwrite them.

        The ids that the first of them give belong to the places `targets`.
        """
        self.tables.update(work, places)
        shape, static = self._shape(work, len(wanted))
        batch = self._batch(shape)
        batch.fill(work, places, self.tables.arrays, self.cache.block_size)
        batch.want(wanted, targets)
        batch.send()
        if not static or self._graphs is None:
            return self._forward(batch), batch
        return self._captured(shape, batch), batch

    @torch.no_grad()
    def _forward(self, batch: Batch) -> Tensor:
        ids = torch.where(batch.ids < 0, self.pending[batch.sources], batch.ids)
        return self.entry.logits(batch, ids, self.cache)

    def _shape(self, work: Sequence[ScheduledWork], wanted: int) -> tuple[BatchShape, bool]:
        """The padded shape, and whether it is one of those that are captured."""
        tokens = sum(each.count for each in work)
        most = max(each.count for each in work)
        if self._graphs is None:
            return BatchShape(self._rows(tokens), len(work), self._rows(wanted), most), False
        if tokens == len(work):
            count = padded_sequences(tokens, self._most_sequences)
            return BatchShape(count, count, count, 1), True
        count, sequences = _padded(tokens, _TOKENS), _padded(max(len(work), wanted), _SEQUENCES)
        if not count or not sequences:
            return BatchShape(tokens, len(work), wanted, most), False
        sequences = min(sequences, count)
        return BatchShape(count, sequences, sequences, _GUESSED if most <= _GUESSED else count), True

    def _rows(self, count: int) -> int:
        """Rows of a product on a processor: MKL takes up to twice as long for 8 to 15 as for 16."""
        return _MKL_ROWS if self._by_mkl and _MKL_ROWS // 2 <= count < _MKL_ROWS else count

    def _batch(self, shape: BatchShape) -> Batch:
        found = self._batches.get(shape)
        if found is None:
            found = Batch(shape, len(self.cache.plan.groups), self._width, self.cache.device)
            self._batches[shape] = found
            if len(self._batches) > _MOST_GRAPHS:
                self._batches.popitem(last=False)
        self._batches.move_to_end(shape)
        return found

    def warm_up(self) -> None:
        """Capture the graphs of all decode steps and of steps with prompts, the largest first: they share memory."""
        if self._graphs is None:
            return
        most = self._most_sequences
        decode = {padded_sequences(count, most) for count in range(1, min(most, self._most_tokens) + 1)}
        shapes = [BatchShape(count, count, count, 1) for count in decode]
        rows = {row for row in _SEQUENCES if row < most} | {_padded(most, _SEQUENCES)} - {0}
        sizes = {size for size in _TOKENS if size < self._most_tokens} | {_padded(self._most_tokens, _TOKENS)} - {0}
        pairs = {(size, min(row, size)) for size in sizes for row in rows}
        shapes += [BatchShape(size, row, row, size) for size, row in pairs]
        for shape in sorted(shapes, key=lambda each: (-each.tokens, -each.sequences)):
            if (shape.most_queries == 1) not in self._eager:
                batch = self._batch(shape)
                batch.clear()
                batch.send()
                self._captured(shape, batch)

    def _captured(self, shape: BatchShape, batch: Batch) -> Tensor:
        """The logits of a graph, or of an eager forward where it cannot be captured."""
        assert self._graphs is not None, "only shapes of graphs come here"
        alone = shape.most_queries == 1
        try:
            if alone not in self._eager:
                logits: Tensor = self._graphs.run((shape, batch), lambda: self._forward(batch))
                return logits
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._eager.add(alone)
            which = "steps that decode" if alone else "steps with prompts"
            logger.warning("%s cannot be captured in graphs and run without them, slower: %.300s", which, error)
        return self._forward(batch)

    @property
    def graphs(self) -> int:
        """How many are captured."""
        return 0 if self._graphs is None else len(self._graphs)

    def release(self) -> None:
        """Give the cache back, with graphs and static tensors, which know where pages and weights lay."""
        self._batches.clear()
        if self._graphs is not None:
            self._graphs.clear()
        self.cache.release()
