"""Attention with a bias of keys and a bias of pairs: no score leaves a program, forward and backward.

Tensors are contiguous: queries, keys and values [rows, tokens, heads, d], a mask [rows, keys] and pairs [samples,
heads, queries, keys], where rows are those of all samples. Scores are logarithms of base 2.

[Note: sums over rows] The gradient of pairs is a sum over the rows of a sample. A program owns a tile of it, and
computes the scores of that tile for one row after the other. So nothing is added in memory, and bits do not depend on
the order of programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import cdiv, next_power, programs
from deepspeed.ops.precompile import launch

LOG2E = tl.constexpr(1.4426950408889634)


class EvoformerTile(NamedTuple):
    """The shape of a program: queries and keys of a tile, warps, steps under way."""

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD = EvoformerTile(128, 32, 4, 3)
OF_QUERIES = EvoformerTile(64, 32, 4, 3)
OF_KEYS = EvoformerTile(64, 64, 4, 3)
OF_PAIRS = EvoformerTile(64, 64, 4, 3)
_OF_FLOAT32 = EvoformerTile(32, 32, 4, 1)
"""Its products are of single numbers, which take many registers."""
_WIDE = 128
"""Bytes of a head above which a step is loaded when the one before has ended."""


@triton.jit
def _load(ptr, token, tokens, heads, width, WIDTH: tl.constexpr):
    """[tokens, WIDTH] of a head; zeros beyond the last token."""
    along = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (along < width)[None, :]
    return tl.load(ptr + (token * heads)[:, None] * width + along[None, :], mask=inside, other=0.0)


@triton.jit
def _store(ptr, values, token, tokens, heads, width, WIDTH: tl.constexpr):
    along = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (along < width)[None, :]
    at = ptr + (token * heads)[:, None] * width + along[None, :]
    tl.store(at, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _of_mask(mask_ptr, key, keys):
    """Scores of keys; -inf beyond the last."""
    return tl.load(mask_ptr + key, mask=key < keys, other=float("-inf")).to(tl.float32) * LOG2E


@triton.jit
def _scores(
    a, b, mask_ptr, pairs_ptr, query, key, queries, keys, scale,
    MASK: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[a, b]: `query` and `key` say, as a column and a row or the other way round, where the scores lie."""
    scores = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
    if PAIRS:
        inside = (query < queries) & (key < keys)
        scores += tl.load(pairs_ptr + query * keys + key, mask=inside, other=0.0).to(tl.float32) * LOG2E
    if MASK:
        scores += _of_mask(mask_ptr, key, keys)
    elif not EVEN:
        scores = tl.where(key < keys, scores, float("-inf"))
    return scores


@triton.jit
def _place(tiles, heads, rows):
    """(tile, head, row, sample) of this program: tiles of a head are neighbours, then heads of a row."""
    program = tl.program_id(0)
    row = (program // (tiles * heads)).to(tl.int64)
    return program % tiles, program // tiles % heads, row, row // rows


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, mask_ptr, pairs_ptr, out_ptr, top_ptr, inverse_ptr, rows, queries, keys, heads, width, scale,
    MASK: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    tile, head, row, sample = _place(tl.cdiv(queries, QUERIES), heads, rows)
    of_queries, of_keys = (row * queries * heads + head) * width, (row * keys * heads + head) * width
    k_ptr, v_ptr, mask_ptr = k_ptr + of_keys, v_ptr + of_keys, mask_ptr + row * keys
    pairs_ptr += (sample * heads + head) * queries * keys
    query = tile * QUERIES + tl.arange(0, QUERIES)
    q = _load(q_ptr + of_queries, query, queries, heads, width, WIDTH)
    top, total = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    found = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(0, keys, KEYS):
        key = start + tl.arange(0, KEYS)
        k, v = _load(k_ptr, key, keys, heads, width, WIDTH), _load(v_ptr, key, keys, heads, width, WIDTH)
        scores = _scores(
            q, k, mask_ptr, pairs_ptr, query[:, None], key[None, :], queries, keys, scale * LOG2E, MASK, PAIRS, EVEN
        )
        largest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights, shrunk = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * shrunk + tl.sum(weights, 1)
        found = tl.dot(weights.to(v.dtype), v, found * shrunk[:, None], input_precision="ieee")
        top = largest
    # A query that may attend to nothing gets zeros, and has weights of zero in backward.
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    _store(out_ptr + of_queries, found * inverse[:, None], query, queries, heads, width, WIDTH)
    at = (row * heads + head) * queries + query
    tl.store(top_ptr + at, tl.where(top == float("-inf"), 0.0, top), mask=query < queries)
    tl.store(inverse_ptr + at, inverse, mask=query < queries)


@triton.jit
def _of_queries(
    q_ptr, k_ptr, v_ptr, mask_ptr, pairs_ptr, out_ptr, grad_ptr, top_ptr, inverse_ptr, dot_ptr, dq_ptr,
    rows, queries, keys, heads, width, scale,
    MASK: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of queries, and gradient · output of each, which the other kernels need."""
    tile, head, row, sample = _place(tl.cdiv(queries, QUERIES), heads, rows)
    of_queries, of_keys = (row * queries * heads + head) * width, (row * keys * heads + head) * width
    k_ptr, v_ptr, mask_ptr = k_ptr + of_keys, v_ptr + of_keys, mask_ptr + row * keys
    pairs_ptr += (sample * heads + head) * queries * keys
    query = tile * QUERIES + tl.arange(0, QUERIES)
    q = _load(q_ptr + of_queries, query, queries, heads, width, WIDTH)
    grad = _load(grad_ptr + of_queries, query, queries, heads, width, WIDTH)
    out = _load(out_ptr + of_queries, query, queries, heads, width, WIDTH)
    dots = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    at = (row * heads + head) * queries + query
    tl.store(dot_ptr + at, dots, mask=query < queries)
    top = tl.load(top_ptr + at, mask=query < queries, other=0.0)
    inverse = tl.load(inverse_ptr + at, mask=query < queries, other=0.0)
    found = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(0, keys, KEYS):
        key = start + tl.arange(0, KEYS)
        k, v = _load(k_ptr, key, keys, heads, width, WIDTH), _load(v_ptr, key, keys, heads, width, WIDTH)
        scores = _scores(
            q, k, mask_ptr, pairs_ptr, query[:, None], key[None, :], queries, keys, scale * LOG2E, MASK, PAIRS, EVEN
        )
        weights = tl.exp2(scores - top[:, None]) * inverse[:, None]
        slopes = weights * (tl.dot(grad, tl.trans(v), input_precision="ieee") - dots[:, None])
        found = tl.dot(slopes.to(k.dtype), k, found, input_precision="ieee")
    _store(dq_ptr + of_queries, found * scale, query, queries, heads, width, WIDTH)


@triton.jit
def _of_keys(
    q_ptr, k_ptr, v_ptr, mask_ptr, pairs_ptr, grad_ptr, top_ptr, inverse_ptr, dot_ptr, dk_ptr, dv_ptr, dmask_ptr,
    rows, queries, keys, heads, width, scale,
    MASK: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, and with SUMS a head's part of that of the mask. Scores lie as [keys, queries]."""
    tile, head, row, sample = _place(tl.cdiv(keys, KEYS), heads, rows)
    of_queries, of_keys = (row * queries * heads + head) * width, (row * keys * heads + head) * width
    q_ptr, grad_ptr, mask_ptr = q_ptr + of_queries, grad_ptr + of_queries, mask_ptr + row * keys
    pairs_ptr += (sample * heads + head) * queries * keys
    of_head = (row * heads + head) * queries
    top_ptr, inverse_ptr, dot_ptr = top_ptr + of_head, inverse_ptr + of_head, dot_ptr + of_head
    key = tile * KEYS + tl.arange(0, KEYS)
    k = _load(k_ptr + of_keys, key, keys, heads, width, WIDTH)
    v = _load(v_ptr + of_keys, key, keys, heads, width, WIDTH)
    dk, dv = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
    dmask = tl.zeros((KEYS,), tl.float32)
    for start in range(0, queries, QUERIES):
        query = start + tl.arange(0, QUERIES)
        q = _load(q_ptr, query, queries, heads, width, WIDTH)
        grad = _load(grad_ptr, query, queries, heads, width, WIDTH)
        scores = _scores(
            k, q, mask_ptr, pairs_ptr, query[None, :], key[:, None], queries, keys, scale * LOG2E, MASK, PAIRS, EVEN
        )
        inside = query < queries
        top = tl.load(top_ptr + query, mask=inside, other=float("inf"))  # queries beyond the last have no weight
        inverse = tl.load(inverse_ptr + query, mask=inside, other=0.0)
        dots = tl.load(dot_ptr + query, mask=inside, other=0.0)
        weights = tl.exp2(scores - top[None, :]) * inverse[None, :]
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        slopes = weights * (tl.dot(v, tl.trans(grad), input_precision="ieee") - dots[None, :])
        dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision="ieee")
        if SUMS:
            dmask += tl.sum(slopes, 1)
    _store(dk_ptr + of_keys, dk * scale, key, keys, heads, width, WIDTH)
    _store(dv_ptr + of_keys, dv, key, keys, heads, width, WIDTH)
    if SUMS:
        tl.store(dmask_ptr + (row * heads + head) * keys + key, dmask, mask=key < keys)


@triton.jit
def _of_pairs(
    q_ptr, k_ptr, v_ptr, mask_ptr, pairs_ptr, grad_ptr, top_ptr, inverse_ptr, dot_ptr, dpairs_ptr,
    rows, each, queries, keys, heads, width, scale, stride,
    MASK: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of pairs over `each` rows: [Note: sums over rows]."""
    columns = tl.cdiv(keys, KEYS)
    tile, head, sample, _ = _place(columns * tl.cdiv(queries, QUERIES), heads, 1)
    query = tile // columns * QUERIES + tl.arange(0, QUERIES)
    key = tile % columns * KEYS + tl.arange(0, KEYS)
    inside = (query < queries)[:, None] & (key < keys)[None, :]
    at = (sample * heads + head) * queries * keys + query[:, None] * keys + key[None, :]
    pairs = tl.load(pairs_ptr + at, mask=inside, other=0.0).to(tl.float32) * LOG2E
    if not EVEN:
        pairs = tl.where(key[None, :] < keys, pairs, float("-inf"))
    total = tl.zeros((QUERIES, KEYS), tl.float32)
    first = tl.program_id(1) * each
    for number in range(first, tl.minimum(rows, first + each)):
        row = sample * rows + number
        of_queries, of_keys = (row * queries * heads + head) * width, (row * keys * heads + head) * width
        q = _load(q_ptr + of_queries, query, queries, heads, width, WIDTH)
        grad = _load(grad_ptr + of_queries, query, queries, heads, width, WIDTH)
        k = _load(k_ptr + of_keys, key, keys, heads, width, WIDTH)
        v = _load(v_ptr + of_keys, key, keys, heads, width, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E) + pairs
        if MASK:
            scores += _of_mask(mask_ptr + row * keys, key, keys)[None, :]
        of_head = (row * heads + head) * queries + query
        top = tl.load(top_ptr + of_head, mask=query < queries, other=0.0)
        inverse = tl.load(inverse_ptr + of_head, mask=query < queries, other=0.0)
        dots = tl.load(dot_ptr + of_head, mask=query < queries, other=0.0)
        weights = tl.exp2(scores - top[:, None]) * inverse[:, None]
        total += weights * (tl.dot(grad, tl.trans(v), input_precision="ieee") - dots[:, None])
    tl.store(dpairs_ptr + tl.program_id(1) * stride + at, total, mask=inside)


class _Launch:
    """What the launches of one call have in common."""

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, pairs: Tensor | None) -> None:
        self.samples, self.rows, self.queries, self.heads, self.width = query.shape
        self.keys = key.shape[2]
        self.biases = [query if bias is None else bias for bias in (mask, pairs)]
        self.dtype = query.dtype
        self.sizes = (self.queries, self.keys, self.heads, self.width, self.width**-0.5)
        self.masked, self.paired = mask is not None, pairs is not None

    def over(self, tokens: int, part: int) -> tuple[int]:
        """A program for each part of the tokens of each head of each row."""
        return (self.samples * self.rows * self.heads * cdiv(tokens, part),)

    def tile(self, tile: EvoformerTile) -> EvoformerTile:
        """What of a tile fits such numbers."""
        if self.dtype == torch.float32:
            return _OF_FLOAT32
        return tile._replace(stages=1) if self.width * self.dtype.itemsize > _WIDE else tile

    def options(self, tile: EvoformerTile) -> dict[str, int | bool]:
        """Constants of a kernel."""
        return {
            "MASK": self.masked, "EVEN": self.keys % tile.keys == 0, "WIDTH": max(16, next_power(self.width)),
            "QUERIES": tile.queries, "KEYS": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, pairs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, largest score and 1 / sum of weights of each query [samples, rows, heads, queries])."""
    it = _Launch(query, key, mask, pairs)
    out = torch.empty_like(query)
    top, inverse = (query.new_empty(it.samples, it.rows, it.heads, it.queries, dtype=torch.float32) for _ in range(2))
    tile = it.tile(FORWARD)
    if out.numel():
        launch(
            _forward, it.over(it.queries, tile.queries),
            query, key, value, *it.biases, out, top, inverse, it.rows, *it.sizes, PAIRS=it.paired, **it.options(tile),
        )  # fmt: skip
    return out, top, inverse


def backward(
    saved: tuple[Tensor, ...], mask: Tensor | None, pairs: Tensor | None, grad: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of queries, keys, values, mask and pairs, the last two in float32 if wanted."""
    query, key, value, out, top, inverse = saved
    it = _Launch(query, key, mask, pairs)
    inputs = (query, key, value, *it.biases)
    dots = torch.empty_like(top)
    dq, dk, dv = (torch.empty_like(each) for each in (query, key, value))
    dmask = top.new_empty(it.samples, it.rows, it.heads, it.keys) if wanted[0] else None
    if not (query.numel() and key.numel()):
        zeros = (None if not want else torch.zeros_like(bias) for want, bias in zip(wanted, it.biases, strict=True))
        return *(each.zero_() for each in (dq, dk, dv)), *zeros
    tile = it.tile(OF_QUERIES)
    launch(
        _of_queries, it.over(it.queries, tile.queries),
        *inputs, out, grad, top, inverse, dots, dq, it.rows, *it.sizes, PAIRS=it.paired, **it.options(tile),
    )  # fmt: skip
    tile = it.tile(OF_KEYS)
    launch(
        _of_keys, it.over(it.keys, tile.keys),
        *inputs, grad, top, inverse, dots, dk, dv, dots if dmask is None else dmask, it.rows, *it.sizes,
        PAIRS=it.paired, SUMS=dmask is not None, **it.options(tile),
    )  # fmt: skip
    dpairs = _sum_of_pairs(it, inputs, (grad, top, inverse, dots)) if wanted[1] else None
    return dq, dk, dv, None if dmask is None else dmask.sum(2)[:, :, None, None], dpairs


def _sum_of_pairs(it: _Launch, inputs: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Tensor:
    """Programs share the rows until every processor has some."""
    pairs, tile = inputs[-1], it.tile(OF_PAIRS)
    tiles = it.samples * it.heads * cdiv(it.queries, tile.queries) * cdiv(it.keys, tile.keys)
    each = cdiv(it.rows, cdiv(programs(pairs.device, tiles * it.rows, per_unit=8), tiles))
    parts = cdiv(it.rows, each)
    total = torch.empty(parts, *pairs.shape, dtype=torch.float32, device=pairs.device)
    launch(
        _of_pairs, (tiles, parts),
        *inputs, *saved, total, it.rows, each, *it.sizes, pairs.numel(), **it.options(tile),
    )  # fmt: skip
    return total.sum(0) if parts > 1 else total[0]
