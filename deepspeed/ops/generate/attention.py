"""Attention of ragged queries to keys and values that lie in pages: op `paged_attention`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

if TYPE_CHECKING:
    from deepspeed.ops.generate.kernels.attention import AttentionTile

__all__ = ["AttentionOptions", "paged_attention", "paged_attention_reference", "paged_attention_triton"]

WIDEST = 256
"""Elements of a head that the kernels hold."""
_CACHED = 2**21
"""Bytes of keys that stay in a processor's cache between their copy and their use."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer's attention computes, and how many queries a sequence has at most."""

    scale: float
    max_query: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    """[query heads] logits that take part in the sum of the softmax, and have no value."""
    alibi: Tensor | None = None
    """[query heads] slopes: slope · (key position − query position) is added to scores."""
    key_scale: Tensor | None = None
    """float32 with 1 or [key heads] elements: keys are those of the pages times this."""
    value_scale: Tensor | None = None
    deterministic: bool = False
    """A query gets the same bits in any batch."""
    tile: AttentionTile | None = None
    """The shape of programs; None: by the shapes of the tensors."""


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """[tokens, heads, value width]: attention of query [tokens, heads, width] to pages [blocks, size, heads, width].

    Sequence s has the queries starts[s] to starts[s+1] and keeps lengths[s] tokens, these included, in the blocks
    tables[s]; a block of -1 is not read. Query i of n has position lengths[s] - n + i and sees a window's tokens up to
    itself. Rows behind starts[-1] are padding: their results are finite and mean nothing. Launches depend on shapes
    and on `max_query` only, so they can be captured.
    """
    result: Tensor = op("paged_attention")(query, key_pages, value_pages, tables, starts, lengths, options)
    return result


@reference("paged_attention")
@torch.no_grad()
def paged_attention_reference(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """In plain torch: sequences of one query together, others one by one."""
    out = query.new_zeros(*query.shape[:2], value_pages.shape[-1])
    first, sizes = starts.tolist(), lengths.tolist()
    counts = [after - before for before, after in itertools.pairwise(first)]
    alone = [s for s, count in enumerate(counts) if count == 1 and sizes[s]]
    fitting = _CACHED // key_pages[0, 0].nbytes
    for some in _batches(alone, sizes, fitting):
        chosen = torch.tensor(some, device=query.device)
        rows = query[starts[chosen].long()].unsqueeze(1)
        out[starts[chosen].long()] = _attend(
            rows, key_pages, value_pages, tables[chosen], [sizes[s] for s in some], options
        )[:, 0]
    for s, count in enumerate(counts):
        if count > 1:
            rows = query[first[s] : first[s + 1]].unsqueeze(0)
            found = _attend(rows, key_pages, value_pages, tables[s : s + 1], [sizes[s]], options)
            out[first[s] : first[s + 1]] = found[0]
    return out


def _batches(sequences: list[int], sizes: list[int], tokens: int) -> list[list[int]]:
    """Sequences of similar lengths together: a quarter of a batch is padding at most, and it has so many tokens."""
    batches: list[list[int]] = []
    for s in sorted(sequences, key=lambda s: sizes[s]):
        batch = batches[-1] if batches else []
        if batch and 4 * sizes[batch[0]] >= 3 * sizes[s] and (len(batch) + 1) * sizes[s] <= tokens:
            batch.append(s)
        else:
            batches.append([s])
    return batches


def _attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, tables: Tensor, sizes: list[int], options: AttentionOptions
) -> Tensor:
    """[batch, queries, heads, value width] for a batch in which every sequence has as many queries."""
    batch, count, heads, width = query.shape
    size, kv_heads = key_pages.shape[1:3]
    longest, device = max(sizes), query.device
    position = torch.arange(longest, device=device)
    lengths = torch.tensor(sizes, device=device)
    # What is behind the last token of a sequence is read from this token: other memory may hold NaN.
    at = torch.minimum(position, (lengths - 1).unsqueeze(1))
    blocks = tables.long().gather(1, at // size)
    used, offsets = blocks.clamp(min=0), at % size
    keys = _gathered(key_pages, used, offsets, options.key_scale, query.dtype)
    values = _gathered(value_pages, used, offsets, options.value_scale, query.dtype)
    places = lengths.unsqueeze(1) - count + torch.arange(count, device=device)
    behind = places.unsqueeze(2) - position  # [batch, queries, keys]
    seen = (position < lengths.unsqueeze(1)).unsqueeze(1) & (blocks >= 0).unsqueeze(1) & (behind >= 0)
    if options.window is not None:
        seen = seen & (behind < options.window)
    # Heads that read one key head are further queries of it.
    groups = heads // kv_heads
    rows = query.view(batch, count, kv_heads, groups, width).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, groups * count, width)
    mask = seen.new_zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
    bias = mask[:, None, None].expand(batch, kv_heads, groups, count, longest)
    if options.alibi is not None:
        bias = bias - options.alibi.to(query.dtype).view(kv_heads, groups, 1, 1) * behind[:, None, None]
    bias = (
        bias.reshape(batch, kv_heads, groups * count, longest)
        if groups > 1 or options.alibi is not None
        else bias[:, :, 0]
    )
    if options.soft_cap is None and options.sinks is None and query.dtype != torch.float16:
        found = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=options.scale)
    else:
        found = _softmax(rows, keys, values, bias, options)
    found = found.view(batch, kv_heads, groups, count, -1).permute(0, 3, 1, 2, 4)
    return found.reshape(batch, count, heads, -1)


def _gathered(pages: Tensor, blocks: Tensor, offsets: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[batch, key heads, tokens, width] of tokens by blocks and offsets [batch, tokens]."""
    size, heads, width = pages.shape[1:]
    line, stride = heads * width, pages.stride(0)
    if pages.itemsize > 1 and pages[0].is_contiguous() and stride % line == 0:
        # Whole lines of memory: on a CPU this is several times as fast as an index.
        lines = pages.as_strided(((len(pages) - 1) * (stride // line) + size, line), (line, 1))
        found = functional.embedding(blocks * (stride // line) + offsets, lines)
    else:
        found = pages[blocks, offsets].to(dtype)
    found = found.view(*blocks.shape, heads, width)
    if scale is not None:
        found = (found * scale.view(-1, 1)).to(dtype)
    return found.transpose(1, 2)


def _softmax(rows: Tensor, keys: Tensor, values: Tensor, bias: Tensor, options: AttentionOptions) -> Tensor:
    """As the formula says it, in float32."""
    scores = (rows.float() @ keys.float().transpose(2, 3)) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores + bias.float()
    largest = scores.amax(-1, keepdim=True)
    if options.sinks is None:
        total = None
    else:
        sinks = options.sinks.float().view(1, keys.shape[1], -1, 1)
        sinks = sinks.expand(-1, -1, -1, rows.shape[2] // sinks.shape[2]).reshape(1, keys.shape[1], -1, 1)
        largest = torch.maximum(largest, sinks)
        total = torch.exp(sinks - largest)
    largest = largest.clamp(min=torch.finfo(torch.float32).min)  # of a query that sees nothing
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True) + (0.0 if total is None else total)
    return ((weights / total.clamp(min=1e-30)) @ values.float()).to(rows.dtype)


@by_triton("paged_attention")
@torch.no_grad()
def paged_attention_triton(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """By the kernels where they can."""
    whole = all(x.stride(-1) == 1 for x in (query, key_pages, value_pages, tables))
    if not (takes(query) and whole and max(query.shape[-1], value_pages.shape[-1]) <= WIDEST):
        return paged_attention_reference(query, key_pages, value_pages, tables, starts, lengths, options)
    from deepspeed.ops.generate.kernels.attention import attend

    return attend(query, key_pages, value_pages, tables, starts, lengths, options)
