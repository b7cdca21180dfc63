"""Few rows times up to three weights in one launch, as fast as the weights are read.

[Note: streamed products] A program multiplies rows of a weight by columns of x: the weight is the left factor, so that
tensor cores take it as it lies in memory, and the few rows of x are the narrow side. Where there are fewer tiles than
processors, several programs share a tile, each a part of the inner dim: they write sums of float32 to `partial`, and
the last one to finish (it finds so in `counters`, which it sets back to zero) adds them up in order. So results do not
depend on which was the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import KINDS, act, after_others, cdiv, next_power, overlaps
from deepspeed.ops.precompile import launch


class ProductTile(NamedTuple):
    """The shape of a program: rows of the weight, columns of a step, steps under way, warps."""

    out: int = 64
    inner: int = 128
    stages: int = 4
    warps: int = 4


@triton.jit
def _times(w_ptr, w_row, v_ptr, v_row, x_ptr, x_row, first, rows, outs, begin, end, inner,
           BOTH: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
           WHOLE: tl.constexpr):  # fmt: skip
    """[OUT, ROWS] float32: a tile of a weight's rows times the transpose of x, over inner steps [begin, end).

    With BOTH, also that tile of another weight; else zeros.
    """
    out, row, at = first + tl.arange(0, OUT), tl.arange(0, ROWS), tl.arange(0, INNER)
    line = tl.minimum(out, outs - 1).to(tl.int64)[:, None]
    w_at, v_at = w_ptr + line * w_row + at[None, :], v_ptr + line * v_row + at[None, :]
    x_at = x_ptr + tl.minimum(row, rows - 1)[None, :] * x_row + at[:, None]
    total, other = tl.zeros((OUT, ROWS), dtype=tl.float32), tl.zeros((OUT, ROWS), dtype=tl.float32)
    for step in range(begin, end):
        inside = at < inner - step * INNER
        if WHOLE:
            x = tl.load(x_at + step * INNER)
            w = tl.load(w_at + step * INNER, eviction_policy="evict_first")
        else:
            x = tl.load(x_at + step * INNER, mask=inside[:, None], other=0.0)
            w = tl.load(w_at + step * INNER, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        if BOTH:
            if WHOLE:
                v = tl.load(v_at + step * INNER, eviction_policy="evict_first")
            else:
                v = tl.load(v_at + step * INNER, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            other = tl.dot(v, x, other)
        total = tl.dot(w, x, total)
    return total, other


@triton.jit
def keep(partial_ptr, tile, part, total, PARTS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr):
    """Write what a program found of a tile."""
    place = tl.arange(0, OUT)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(partial_ptr + (tile.to(tl.int64) * PARTS + part) * (OUT * ROWS) + place, total)


@triton.jit
def arrive(counters_ptr, tile, PARTS: tl.constexpr):
    """Whether this program is the last of a tile's, after it has written what it found."""
    tl.debug_barrier()  # all threads have written before one of them counts
    last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == PARTS - 1
    if last:
        tl.store(counters_ptr + tile, 0)
    return last


@triton.jit
def together(partial_ptr, tile, PARTS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr):
    """The sum of what all programs of a tile found, in their order."""
    place = tl.arange(0, OUT)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.zeros((OUT, ROWS), dtype=tl.float32)
    for part in range(PARTS):
        at = (tile.to(tl.int64) * PARTS + part) * (OUT * ROWS)
        total += tl.load(partial_ptr + at + place, cache_modifier=".cg")
    return total


@triton.jit
def put(y_ptr, bias_ptr, total, first, rows, outs, BIAS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr):
    out, row = first + tl.arange(0, OUT), tl.arange(0, ROWS)
    if BIAS:
        total += tl.load(bias_ptr + out, mask=out < outs, other=0.0).to(tl.float32)[:, None]
    inside = (out < outs)[:, None] & (row < rows)[None, :]
    tl.store(y_ptr + row[None, :] * outs + out[:, None], total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _stream(
    x_ptr, w1_ptr, w2_ptr, w3_ptr, b1_ptr, b2_ptr, b3_ptr, y_ptr, partial_ptr, counters_ptr,
    rows, inner, x_row, w1_row, w2_row, w3_row, outs1, outs2, outs3, tiles1, tiles2, steps,
    B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr, PARTS: tl.constexpr,
    OUT: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    w_ptr, w_row, outs, first, which = w1_ptr, w1_row, outs1, tile * OUT, 1
    if tile >= tiles2:
        w_ptr, w_row, outs, first, which = w3_ptr, w3_row, outs3, (tile - tiles2) * OUT, 3
        y_ptr += rows * (outs1 + outs2)
    elif tile >= tiles1:
        w_ptr, w_row, outs, first, which = w2_ptr, w2_row, outs2, (tile - tiles1) * OUT, 2
        y_ptr += rows * outs1
    begin = part * steps
    end = tl.minimum(begin + steps, tl.cdiv(inner, INNER))
    total, _ = _times(
        w_ptr, w_row, w_ptr, w_row, x_ptr, x_row, first, rows, outs, begin, end, inner, False, OUT, INNER, ROWS, WHOLE
    )  # fmt: skip
    last = part >= 0
    if PARTS > 1:
        keep(partial_ptr, tile, part, total, PARTS, OUT, ROWS)
        last = arrive(counters_ptr, tile, PARTS)
    if last:
        if PARTS > 1:
            total = together(partial_ptr, tile, PARTS, OUT, ROWS)
        if which == 1:
            put(y_ptr, b1_ptr, total, first, rows, outs, B1, OUT, ROWS)
        elif which == 2:
            put(y_ptr, b2_ptr, total, first, rows, outs, B2, OUT, ROWS)
        else:
            put(y_ptr, b3_ptr, total, first, rows, outs, B3, OUT, ROWS)


@triton.jit
def _stream_gated(
    x_ptr, gate_ptr, up_ptr, b1_ptr, b2_ptr, y_ptr, partial_ptr, counters_ptr,
    rows, inner, x_row, gate_row, up_row, outs, tiles, steps,
    B1: tl.constexpr, B2: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr,
    OUT: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    first, begin = tile * OUT, part * steps
    end = tl.minimum(begin + steps, tl.cdiv(inner, INNER))
    out, row = first + tl.arange(0, OUT), tl.arange(0, ROWS)
    gate, up = _times(
        gate_ptr, gate_row, up_ptr, up_row, x_ptr, x_row, first, rows, outs, begin, end, inner, True, OUT, INNER, ROWS,
        WHOLE,
    )  # fmt: skip
    last = part >= 0
    if PARTS > 1:
        keep(partial_ptr, tile, part, gate, PARTS, OUT, ROWS)
        keep(partial_ptr, tile + tiles, part, up, PARTS, OUT, ROWS)
        last = arrive(counters_ptr, tile, PARTS)
    if last:
        if PARTS > 1:
            gate = together(partial_ptr, tile, PARTS, OUT, ROWS)
            up = together(partial_ptr, tile + tiles, PARTS, OUT, ROWS)
        if B1:
            gate += tl.load(b1_ptr + out, mask=out < outs, other=0.0).to(tl.float32)[:, None]
        if B2:
            up += tl.load(b2_ptr + out, mask=out < outs, other=0.0).to(tl.float32)[:, None]
        type: tl.constexpr = y_ptr.dtype.element_ty
        gate, up = gate.to(type).to(tl.float32), up.to(type).to(tl.float32)  # as products by themselves are rounded
        inside = (out < outs)[:, None] & (row < rows)[None, :]
        tl.store(y_ptr + row[None, :] * outs + out[:, None], (act(gate, KIND)[0] * up).to(type), mask=inside)


@lru_cache(None)
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache(None)
def counters(device: torch.device) -> Tensor:
    """Zeros that programs of a tile count in, and leave as zeros; launches that use them are of one stream."""
    return torch.zeros(2**16, dtype=torch.int32, device=device)


@lru_cache(4096)
def parts_of(tiles: int, steps: int, units: int) -> tuple[int, int]:
    """(programs of a tile, steps of each): so that all processors have nearly the same to read."""
    best, found = float("inf"), (1, steps)
    for wanted in range(1, min(steps, 32) + 1):
        each = cdiv(steps, wanted)
        parts = cdiv(steps, each)
        cost = cdiv(tiles * parts, units) * (each + (1.5 if parts == 1 else 2.5))
        if cost < best - 1e-9:
            best, found = cost, (parts, each)
    return found


def scratch(tiles: int, parts: int, tile: ProductTile, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(memory for sums of parts, counters)."""
    count = tiles * parts * tile.out * rows if parts > 1 else 1
    return torch.empty(count, dtype=torch.float32, device=like.device), counters(like.device)


def stream(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tile: ProductTile | None = None
) -> list[Tensor]:
    """[rows, out] for each of up to three weights [out, in]; x is [rows, in]."""
    tile = tile or ProductTile()
    rows, inner = x.shape
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    outs = [w.shape[0] for w in weights]
    found = torch.empty(rows * sum(outs), dtype=x.dtype, device=x.device)
    three = [*weights, *[weights[0]] * (3 - len(weights))]
    given = [*biases, *[None] * (3 - len(weights))]
    sizes = [*outs, 0, 0][:3]
    ends = [cdiv(sizes[0], tile.out), cdiv(sizes[0], tile.out) + cdiv(sizes[1], tile.out)]
    tiles = ends[1] + cdiv(sizes[2], tile.out)
    parts, steps = parts_of(tiles, cdiv(inner, tile.inner), processors(x.device))
    narrow = max(16, next_power(rows))
    launch(
        _stream, (tiles * parts,),
        x, *three, *(three[0] if bias is None else bias for bias in given), found,
        *scratch(tiles, parts, tile, narrow, x), rows, inner, x.stride(0), *(w.stride(0) for w in three), *sizes,
        *ends, steps, B1=given[0] is not None, B2=given[1] is not None, B3=given[2] is not None, PARTS=parts,
        OUT=tile.out, INNER=tile.inner, ROWS=narrow, WHOLE=inner % tile.inner == 0,
        num_warps=tile.warps, num_stages=tile.stages, **overlaps(x.device),
    )  # fmt: skip
    return [each.view(rows, -1) for each in found.split([rows * out for out in outs])]


def stream_gated(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], kind: str, tile: ProductTile | None = None
) -> Tensor:
    """act(x · gateᵀ) · (x · upᵀ) of two weights [out, in] of one shape."""
    tile = tile or ProductTile(stages=4 if len(x) <= 16 else 3)
    rows, inner = x.shape
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    outs = weights[0].shape[0]
    found = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    tiles = cdiv(outs, tile.out)
    parts, steps = parts_of(tiles, cdiv(inner, tile.inner), processors(x.device))
    narrow = max(16, next_power(rows))
    launch(
        _stream_gated, (tiles * parts,),
        x, *weights, *(found if bias is None else bias for bias in biases), found,
        *scratch(2 * tiles, parts, tile, narrow, x), rows, inner, x.stride(0), *(w.stride(0) for w in weights), outs,
        tiles, steps, B1=biases[0] is not None, B2=biases[1] is not None, KIND=KINDS[kind], PARTS=parts,
        OUT=tile.out, INNER=tile.inner, ROWS=narrow, WHOLE=inner % tile.inner == 0,
        num_warps=tile.warps, num_stages=tile.stages, **overlaps(x.device),
    )  # fmt: skip
    return found
