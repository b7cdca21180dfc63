"""Attention over pages: the function that Transformers' modules call while an engine runs their model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.fusion.attention import LateRotation
from deepspeed.generate.batch import Batch
from deepspeed.generate.cache import CachedLayer, PagedCache
from deepspeed.ops.generate.attention import AttentionOptions, paged_attention
from deepspeed.ops.generate.pages import PageTarget, rotary_write, write_pages


class PagedAttentionFunction:
    """One engine's: it knows the batch that runs now, and the pages."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._batch: Batch | None = None
        self._cache: PagedCache | None = None
        self.sources: dict[int, int] = {}
        """Of each layer: the one whose keys and values it reads."""
        self.late: dict[int, LateRotation] = {}
        """Of layers whose queries and keys can be rotated here."""

    @contextmanager
    def running(self, batch: Batch, cache: PagedCache) -> Iterator[None]:
        """The forward inside computes this batch."""
        self._batch, self._cache = batch, cache
        autocast = torch.is_autocast_enabled(cache.device.type)
        try:
            for each in self.late.values():
                each.how = "at once" if autocast else "later"
            yield
        finally:
            self._batch = self._cache = None
            for each in self.late.values():
                each.how, each.given = "at once", None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Write keys and values [1, heads, tokens, width] to the pages, and attend to what sequences have there."""
        batch, cache = self._batch, self._cache
        if batch is None or cache is None:
            raise UsageError(
                f"{type(module).__name__} was called outside of its engine while the engine holds the model's "
                "attention. Call the engine's methods, or close it first."
            )
        number = layer_of(module)
        layer = cache.layer(self.sources[number])
        if torch.is_autocast_enabled(query.device.type):
            kind = query.dtype if layer.key_scale is not None else layer.keys.dtype
            with torch.autocast(query.device.type, enabled=False):
                return self(module, query.to(kind), key.to(kind), value.to(kind), attention_mask, scaling, **options)
        rows = _rows(query)
        if self.sources[number] == number:
            target = PageTarget(layer.keys, layer.values, batch.slots[layer.group], layer.key_scale, layer.value_scale)
            late = self.late.get(number)
            if late is not None and late.given is not None:
                (turned, _, cos, sin), late.given = late.given, None
                assert turned is query, "a module that changes what it rotated rotates by itself"
                rows = rotary_write(rows, _rows(key), _rows(value), cos[0], sin[0], target)
            else:
                write_pages(_rows(key), _rows(value), target)
        alone = self._deterministic and query.device.type == "cpu"
        how = AttentionOptions(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            max_query=1 if alone else batch.shape.most_queries,
            window=layer.window,
            soft_cap=options.get("softcap"),
            sinks=options.get("s_aux"),
            deterministic=self._deterministic,
            key_scale=layer.key_scale,
            value_scale=layer.value_scale,
        )
        table = batch.tables[layer.group]
        if alone:
            out = _one_by_one(how, rows, layer, table, batch)
        else:
            out = paged_attention(rows, layer.keys, layer.values, table, batch.starts, batch.lengths, how)
        return out[None], None


def layer_of(module: nn.Module) -> int:
    """The number of the layer that an attention module belongs to."""
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int):
        raise UsageError(f"{type(module).__name__} has no layer_idx, by which its keys and values are found in a cache")
    return number


def _one_by_one(how: AttentionOptions, query: Tensor, layer: CachedLayer, table: Tensor, batch: Batch) -> Tensor:
    """Each query alone, because products on a processor have other bits together; rows of padding are zeros."""
    out, row = query.new_zeros(*query.shape[:2], layer.values.shape[-1]), 0
    for place, (count, context) in enumerate(zip(batch.counts, batch.contexts, strict=True)):
        for seen in range(context - count + 1, context + 1):
            starts = torch.tensor([0, 1], dtype=torch.int32)
            lengths = torch.tensor([seen], dtype=torch.int32)
            one, mine = query[row : row + 1], table[place : place + 1]
            out[row] = paged_attention(one, layer.keys, layer.values, mine, starts, lengths, how)[0]
            row += 1
    return out


def _rows(heads: Tensor) -> Tensor:
    """[1, heads, tokens, width] → [tokens, heads, width]."""
    return heads[0].transpose(0, 1)
