"""Models that compute attention by themselves: sequences with as many new tokens run as rows, padded on the left."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.generate.batch import Batch
from deepspeed.generate.cache import LayerShape, PagedCache
from deepspeed.ops.generate.pages import PageTarget, write_pages

Forward = Callable[[Tensor, Tensor, Tensor, "PaddedCache"], Tensor]
"""(ids, positions, mask, cache) → logits, of [rows, tokens]."""


class _TransformersCache:
    """What models ask a cache of Transformers for."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = (False,)

    def __init__(self, past: int) -> None:
        self._past = past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those of the forward."""
        return self._past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The place of the first query among the keys."""
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, place of the first one)."""
        return self._past + query_length, 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


class ProbeCache(_TransformersCache):
    """Notes what layers keep; `padded`: what is kept so far, after one token of padding."""

    def __init__(self, padded: ProbeCache | None = None) -> None:
        self._before = {} if padded is None else padded.kept
        super().__init__(1 + next(iter(self._before.values()))[0].shape[2] if self._before else 0)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """What pages hold of each layer."""
        found = ((layer, *self.kept[layer]) for layer in sorted(self.kept))
        return tuple(LayerShape(layer, key.shape[1], key.shape[-1], value.shape[-1]) for layer, key, value in found)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What a layer calls with [rows, heads, count, width]."""
        self.kept[layer_idx] = key, value
        if layer_idx not in self._before:
            return key, value
        pairs = zip(self._before[layer_idx], (key, value), strict=True)
        keys, values = (torch.cat((old[:, :, :1], old, new), 2) for old, new in pairs)
        return keys, values


class PaddedCache(_TransformersCache):
    """Writes new keys and values of some rows to pages, and gives all of these rows, the last one on the right."""

    def __init__(self, cache: PagedCache, slots: Tensor, read: Tensor, count: int) -> None:
        super().__init__(read.shape[1] - count)
        self._cache = cache
        self._slots = slots  # [rows · count]
        self._read = read  # [rows, longest]: slots of all tokens; padding reads the first token

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What a layer calls with [rows, heads, count, width]."""
        layer = self._cache.layer(layer_idx)
        rows = [each.transpose(1, 2).flatten(0, 1) for each in (key, value)]
        target = PageTarget(layer.keys, layer.values, self._slots)
        write_pages(rows[0].to(layer.keys.dtype), rows[1].to(layer.values.dtype), target)
        pages = (each.flatten(0, 1) for each in (layer.keys, layer.values))
        keys, values = (each[self._read].transpose(1, 2).contiguous() for each in pages)  # some models view them
        return keys, values


def padded_logits(forward: Forward, batch: Batch, ids: Tensor, cache: PagedCache, *, pads: bool) -> Tensor:
    """Logits of the tokens that a batch wants: one forward for neighbours of as many new tokens.

    In this order, because a sequence may share blocks that one before it fills. `pads`: whether the model ignores
    padding; else the neighbours have equal contexts, too.
    """
    device, size = ids.device, cache.block_size
    counts = torch.tensor(batch.counts)
    first = counts.cumsum(0) - counts
    contexts = torch.tensor(batch.contexts)
    whole: Tensor | None = None
    alike = list(zip(batch.counts, batch.contexts if not pads else batch.counts, strict=True))
    for (count, _), held in itertools.groupby(range(len(alike)), alike.__getitem__):
        chosen = torch.tensor(list(held))
        at = (first[chosen, None] + torch.arange(count)).to(device)  # [rows, count] in the row of all tokens
        lengths = contexts[chosen, None]
        longest = int(lengths.max())
        places = torch.arange(longest) - (longest - lengths)  # [rows, longest]; below 0: padding
        mask, inside = (places >= 0).to(device), places.clamp(min=0).to(device)
        blocks = batch.tables[0][chosen.to(device)].long().gather(1, inside // size).clamp(min=0)
        past = PaddedCache(cache, batch.slots[0][at].flatten(), blocks * size + inside % size, count)
        found = forward(ids[at], batch.positions[at], mask.long(), past)
        if whole is None:
            whole = found.new_zeros(len(ids), found.shape[-1])
        whole[at.flatten()] = found.flatten(0, 1)
    assert whole is not None, "a batch has work"
    return whole[batch.wanted]
