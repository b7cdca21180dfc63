"""Attention to pages: tiles of queries and of the heads that share a key head, contexts split over programs.

[Note: tiles of ragged queries] A tile has QUERIES consecutive queries of one sequence, each with all heads of a group.
Sequence s begins at tile starts[s] // QUERIES + s, which leaves room for all of its tiles. So the number of programs
depends on shapes only, and a program finds its sequence by bisection. One that finds no queries ends.

[Note: split contexts] Where there are few tiles, the keys of a tile are divided among programs. Each writes its result
and the logarithm of its sum of weights, -inf where it saw no key, and a second kernel joins them. With `deterministic`
the divisions are at fixed positions, so the numbers of a query do not depend on other queries or on the length.

[Note: prompts beside single queries] A tile for prompts has far more rows than a sequence that decodes has queries.
Where both may come, they have a launch each, with tiles of their own; a program of the other kind ends at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.generate.kernels.streaming import processors
from deepspeed.ops.model.kernels.common import after_others, cdiv, next_power, overlaps
from deepspeed.ops.precompile import launch

if TYPE_CHECKING:
    from deepspeed.ops.generate.attention import AttentionOptions

FIXED = 4096
"""Keys of a program where divisions are at fixed positions."""


class AttentionTile(NamedTuple):
    """The shape of a program: rows (queries · heads of a group), keys of a step, steps under way, warps."""

    rows: int
    keys: int
    stages: int
    warps: int
    splits: int
    """Programs among which the keys of a tile are divided."""


@triton.jit
def _sequence(starts_ptr, tile, sequences, QUERIES: tl.constexpr):
    """The last sequence that begins at this tile or before."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _keys(
    q, top, weight, found, key_ptr, value_ptr, table_ptr, begin, end, place, window, length, scale, slope,
    key_block, key_token, value_block, value_token, width, value_width, soft_cap,
    SIZE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Take keys [begin, end) into (largest score, sum of weights, weighted values); `place` are query positions."""
    at, along, value_along = tl.arange(0, KEYS), tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    ahead = tl.load(table_ptr + (begin + at) // SIZE, mask=begin + at < length, other=-1)
    for start in range(begin, end, KEYS):
        position = start + at
        block = ahead.to(tl.int64)  # loaded a step before, so that the loads of keys need not wait for it
        ahead = tl.load(table_ptr + (position + KEYS) // SIZE, mask=position + KEYS < length, other=-1)
        there, offset = block >= 0, position % SIZE
        key_at = key_ptr + (block * key_block + offset * key_token)[None, :] + along[:, None]
        value_at = value_ptr + (block * value_block + offset * value_token)[:, None] + value_along[None, :]
        if EVEN:
            k = tl.load(key_at, mask=there[None, :], other=0.0)
            v = tl.load(value_at, mask=there[:, None], other=0.0)
        else:
            k = tl.load(key_at, mask=there[None, :] & (along < width)[:, None], other=0.0)
            v = tl.load(value_at, mask=there[:, None] & (value_along < value_width)[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if CAP:
            scores = tl.exp2(scores * 2.8853900817779268) + 1.0  # soft_cap · tanh(scores), in base 2 as all scores
            scores = soft_cap * 1.4426950408889634 * (1.0 - 2.0 / scores)
        if ALIBI:
            scores += slope[:, None] * (position[None, :] - place[:, None]).to(tl.float32)
        seen = there[None, :]
        if MASKED:
            behind = place[:, None] - position[None, :]
            seen = seen & (behind >= 0)
            if WINDOW:
                seen = seen & (behind < window)
        scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        p = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(top - base)
        weight = weight * shrunk + tl.sum(p, 1)
        found = tl.dot(p.to(q.dtype), v.to(q.dtype), found * shrunk[:, None], input_precision="ieee")
        top = largest
    return top, weight, found


@triton.jit
def _span(
    length, first, split, splits, window,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """[low, high): the keys that queries from position `first` on see, or those of a split."""
    low, high = 0, tl.minimum(length, first + QUERIES)
    if WINDOW:
        low = tl.maximum(0, first - window + 1) // KEYS * KEYS
    if SPLIT:
        if FIXED > 0:
            low, high = tl.maximum(low, split * FIXED), tl.minimum(high, split * FIXED + FIXED)
        else:
            each = tl.cdiv(tl.cdiv(high - low, KEYS), splits) * KEYS
            low += split * each
            high = tl.minimum(high, low + each)
    return low, high


@triton.jit
def _finish(
    top, weight, found, at, inside, head, kv_head, split, value_scale_ptr, sinks_ptr, out_ptr, part_ptr, sums_ptr,
    stride, value_width,
    VALUE_WIDTH: tl.constexpr, SCALES: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write results, or those of a split."""
    some = weight > 0
    found = found / tl.where(some, weight, 1.0)[:, None]
    total = tl.where(some, top + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
    along = tl.arange(0, VALUE_WIDTH)[None, :]
    whole = inside[:, None] & (along < value_width)
    if SCALES:
        found *= tl.load(value_scale_ptr + kv_head)
    if SPLIT:
        part = split.to(tl.int64) * stride + at
        tl.store(sums_ptr + part, total, mask=inside)
        tl.store(part_ptr + part[:, None] * value_width + along, found, mask=whole)
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
            found = found / (1.0 + tl.exp2(sink - tl.where(some, total, float("inf"))))[:, None]
        tl.store(out_ptr + at[:, None] * value_width + along, found.to(out_ptr.dtype.element_ty), mask=whole)


@triton.jit
def _clear_padding(
    out_ptr, end, tokens, tile, query, head, heads, value_width, QUERIES: tl.constexpr, VALUE_WIDTH: tl.constexpr
):  # fmt: skip
    """Write zeros to rows of padding, of which each has a program with its number."""
    token, along = tile * QUERIES + query, tl.arange(0, VALUE_WIDTH)[None, :]
    padding = (query < QUERIES) & (token >= end) & (token < tokens)
    place = out_ptr + (token.to(tl.int64) * heads + head)[:, None] * value_width + along
    nothing = tl.full(place.shape, 0.0, out_ptr.dtype.element_ty)
    tl.store(place, nothing, mask=padding[:, None] & (along < value_width))


@triton.jit
def _attend(
    q_ptr, key_ptr, value_ptr, table_ptr, starts_ptr, lengths_ptr, sinks_ptr, alibi_ptr, key_scale_ptr, value_scale_ptr,
    out_ptr, part_ptr, sums_ptr, tokens, sequences, scale, soft_cap, window, splits, width, value_width, stride,
    q_token, q_head, key_block, key_token, key_head, value_block, value_token, value_head, table_row,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SINGLE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, SCALES: tl.constexpr, SPLIT: tl.constexpr, FIXED: tl.constexpr,
    EVEN: tl.constexpr, ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ONLY: 1 for sequences of one query, 2 for others, 0 for all."""
    after_others(PDL)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, row = GROUP * tl.num_programs(1), tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    if not SPLIT and ONLY != 1:
        _clear_padding(out_ptr, tl.load(starts_ptr + sequences), tokens, tile, query, head, heads, value_width, QUERIES,
                       VALUE_WIDTH)  # fmt: skip
    s = tile if SINGLE else _sequence(starts_ptr, tile, sequences, QUERIES)
    if s >= sequences:
        return
    begin, count = tl.load(starts_ptr + s), tl.load(starts_ptr + s + 1) - tl.load(starts_ptr + s)
    ahead = 0 if SINGLE else (tile - begin // QUERIES - s) * QUERIES
    if ahead >= count or (ONLY == 1 and count > 1) or (ONLY == 2 and count == 1):
        return
    length, inside = tl.load(lengths_ptr + s), (query < QUERIES) & (query + ahead < count)
    first, token = length - count + ahead, (begin + ahead + query).to(tl.int64)
    at = token * heads + head
    low, high = _span(length, first, split, splits, window, QUERIES, KEYS, WINDOW, SPLIT, FIXED)
    if (low >= high) & SPLIT:
        nothing = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        tl.store(sums_ptr + split.to(tl.int64) * stride + at, nothing, mask=inside)
        return
    along = tl.arange(0, WIDTH)[None, :]
    q_at = q_ptr + token[:, None] * q_token + head[:, None] * q_head + along
    q = tl.load(q_at, mask=inside[:, None] & (along < width), other=0.0)
    if key_ptr.dtype.element_ty == tl.float8e4nv:  # whose numbers become float16 faster than bfloat16
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    factor = scale * tl.load(key_scale_ptr + kv_head) if SCALES else scale
    factor = factor / soft_cap if CAP else factor * 1.4426950408889634
    slope = tl.load(alibi_ptr + head, mask=inside & ALIBI, other=0.0).to(tl.float32) * 1.4426950408889634
    key_ptr, value_ptr = key_ptr + kv_head * key_head, value_ptr + kv_head * value_head
    table_ptr += s.to(tl.int64) * table_row
    top, weight = tl.full((ROWS,), float("-inf"), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)
    found, clear = tl.zeros((ROWS, VALUE_WIDTH), dtype=tl.float32), low
    if not WINDOW and not SINGLE:  # up to here every query sees every key
        clear = tl.maximum(low, tl.minimum(high, first + 1) // KEYS * KEYS)
        top, weight, found = _keys(
            q, top, weight, found, key_ptr, value_ptr, table_ptr, low, clear, first + query, window, length, factor,
            slope, key_block, key_token, value_block, value_token, width, value_width, soft_cap,
            SIZE, KEYS, WIDTH, VALUE_WIDTH, False, WINDOW, CAP, ALIBI, EVEN,
        )  # fmt: skip
    top, weight, found = _keys(
        q, top, weight, found, key_ptr, value_ptr, table_ptr, clear, high, first + query, window, length, factor,
        slope, key_block, key_token, value_block, value_token, width, value_width, soft_cap,
        SIZE, KEYS, WIDTH, VALUE_WIDTH, True, WINDOW, CAP, ALIBI, EVEN,
    )  # fmt: skip
    _finish(
        top, weight, found, at, inside, head, kv_head, split, value_scale_ptr, sinks_ptr, out_ptr, part_ptr, sums_ptr,
        stride, value_width, VALUE_WIDTH, SCALES, SINKS, SPLIT,
    )  # fmt: skip


@triton.jit
def _join(
    part_ptr, sums_ptr, sinks_ptr, starts_ptr, out_ptr, stride, sequences, splits, heads, value_width,
    SPLITS: tl.constexpr, SOME: tl.constexpr, VALUE_WIDTH: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    token, head = tl.program_id(0), tl.program_id(1)
    along = tl.arange(0, VALUE_WIDTH)
    known = along < value_width
    at = token.to(tl.int64) * heads + head
    if token >= tl.load(starts_ptr + sequences):
        tl.store(out_ptr + at * value_width + along, tl.zeros((VALUE_WIDTH,), out_ptr.dtype.element_ty), mask=known)
        return
    sums_ptr, part_ptr = sums_ptr + at, part_ptr + at * value_width
    split = tl.arange(0, SPLITS)
    sums = tl.load(sums_ptr + split.to(tl.int64) * stride, mask=split < splits, other=float("-inf"))
    top = tl.max(sums, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total, found = tl.zeros((), dtype=tl.float32), tl.zeros((VALUE_WIDTH,), dtype=tl.float32)
    for start in range(0, splits, SOME):
        each = start + tl.arange(0, SOME)
        place = each.to(tl.int64) * stride
        share = tl.exp2(tl.load(sums_ptr + place, mask=each < splits, other=float("-inf")) - base)
        total += tl.sum(share, 0)
        some = (share > 0)[:, None] & known[None, :]
        parts = tl.load(part_ptr + place[:, None] * value_width + along[None, :], mask=some, other=0.0)
        found += tl.sum(share[:, None] * parts, 0)
    some = total > 0
    found = found / tl.where(some, total, 1.0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        found = found / (1.0 + tl.exp2(sink - tl.where(some, base + tl.log2(tl.where(some, total, 1.0)), float("inf"))))
    tl.store(out_ptr + at * value_width + along, found.to(out_ptr.dtype.element_ty), mask=known)


def tile_of(query: Tensor, key_pages: Tensor, tables: Tensor, options: AttentionOptions) -> AttentionTile:
    """What a launch of such shapes uses; from shapes and `max_query` alone."""
    tokens, heads, width = query.shape
    kv_heads = key_pages.shape[2]
    group, wide = heads // kv_heads, next_power(width)
    context = tables.shape[1] * key_pages.shape[1]
    if options.deterministic:
        return AttentionTile(64, 64, 2, 4, cdiv(context, FIXED))
    if options.max_query > 1 and options.max_query * group > 16:
        rows = 128 if options.max_query * group > 64 else 64
        programs = (tokens * group // rows + len(tables)) * kv_heads
        return AttentionTile(
            rows, 64, 3 if wide <= 128 else 2, 8 if rows == 128 else 4, _splits(programs, context, query)
        )
    rows = max(16, next_power(options.max_query * group))
    programs = max(len(tables), cdiv(tokens, options.max_query)) * kv_heads
    splits = _splits(programs, context, query)
    if key_pages.itemsize == 1:
        return AttentionTile(rows, 64, 3, 2 if rows == 16 else 4, splits)
    return AttentionTile(rows, 32 if splits < 8 else 64, 3 if splits < 8 or wide > 128 else 4, 4, splits)


def _splits(programs: int, context: int, query: Tensor) -> int:
    """So many that every processor has two to four programs, none with fewer than 128 keys of the longest context."""
    wanted = 4 * processors(query.device) // programs
    return max(1, min(64, wanted if wanted <= 16 else wanted // 2, context // 128))


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor,
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """Op `paged_attention`."""
    sequences = len(tables)
    out = query.new_empty(*query.shape[:2], value_pages.shape[3])
    if not out.numel() or not sequences:
        return out.zero_()
    tile = options.tile or tile_of(query, key_pages, tables, options)
    pages = key_pages, value_pages, tables, starts, lengths
    if sequences == 1 or tile.rows < 128 or options.deterministic:
        return _attended(query, pages, options, tile, out, 0)
    _attended(query, pages, options, tile, out, 2)
    single = replace(options, max_query=1)
    few = tile_of(query[:sequences], key_pages, tables, single)._replace(splits=1)
    return _attended(query, pages, single, few, out, 1)


def _attended(
    query: Tensor, pages: Sequence[Tensor], options: AttentionOptions, tile: AttentionTile, out: Tensor, only: int
) -> Tensor:
    """`out`, to which the sequences of a kind are written: see `_attend`."""
    key_pages, value_pages, tables, starts, lengths = pages
    tokens, heads, width = query.shape
    size, kv_heads = key_pages.shape[1:3]
    value_width, sequences, device = value_pages.shape[3], len(tables), query.device
    group = heads // kv_heads
    rows = max(tile.rows, next_power(group))
    single = options.max_query == 1 and not options.deterministic
    queries = 1 if single else rows // group
    tiles = tokens // queries + sequences if not single else max(sequences, tokens) if only == 0 else sequences
    split = tile.splits > 1
    parts = (
        query.new_empty(tile.splits if split else 1, tokens, heads, value_width, dtype=torch.float32) if split else out
    )
    sums = torch.empty(tile.splits, tokens, heads, dtype=torch.float32, device=device) if split else out
    scaled = options.key_scale is not None or options.value_scale is not None
    key_scale, value_scale = (
        _by_head(x, kv_heads, query) if scaled else out for x in (options.key_scale, options.value_scale)
    )
    whole, value_whole = next_power(max(16, width)), next_power(max(16, value_width))
    launch(
        _attend, (tiles, kv_heads, tile.splits),
        query, key_pages, value_pages, tables, starts, lengths,
        out if options.sinks is None else options.sinks, out if options.alibi is None else options.alibi,
        key_scale, value_scale, out, parts, sums, tokens, sequences,
        float(options.scale), float(options.soft_cap or 0.0), options.window or 0, tile.splits, width, value_width,
        tokens * heads, query.stride(0), query.stride(1), *key_pages.stride()[:3], *value_pages.stride()[:3],
        tables.stride(0),
        GROUP=group, QUERIES=queries, ROWS=rows, SIZE=size, KEYS=tile.keys, WIDTH=whole, VALUE_WIDTH=value_whole,
        SINGLE=single, WINDOW=options.window is not None, CAP=options.soft_cap is not None,
        ALIBI=options.alibi is not None, SINKS=options.sinks is not None, SCALES=scaled, SPLIT=split,
        FIXED=FIXED if options.deterministic else 0, EVEN=whole == width and value_whole == value_width, ONLY=only,
        num_warps=tile.warps, num_stages=tile.stages, **overlaps(device),
    )  # fmt: skip
    if split:
        launch(
            _join, (tokens, heads),
            parts, sums, out if options.sinks is None else options.sinks, starts, out, tokens * heads, sequences,
            tile.splits, heads, value_width,
            SPLITS=next_power(tile.splits), SOME=min(64, next_power(tile.splits)), VALUE_WIDTH=value_whole,
            SINKS=options.sinks is not None, num_warps=4 if tile.splits > 4 else 1, **overlaps(device),
        )  # fmt: skip
    return out


def _by_head(scale: Tensor | None, heads: int, like: Tensor) -> Tensor:
    """float32 [heads], contiguous."""
    if scale is None:
        return torch.ones(heads, dtype=torch.float32, device=like.device)
    return scale if scale.numel() == heads and scale.is_contiguous() else scale.reshape(-1).expand(heads).contiguous()
