"""Tokens times the weights of the experts that they chose, which are read once.

[Note: blocks of pairs] A pair is a token and one of its experts. `_plan` puts the pairs of an expert into blocks of
ROWS; the host knows only how many blocks there are at most, so that a graph can hold the launch. Programs of blocks
that are not there end at once. The pairs of a single token have unlike experts: each is a block, without a plan.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.generate.kernels.packed import form, groups_of, units
from deepspeed.ops.generate.kernels.streaming import processors
from deepspeed.ops.generate.packed_weight import ExpertWeight, PackedWeight
from deepspeed.ops.model.kernels.common import KINDS, act, after_others, cdiv, next_power, overlaps
from deepspeed.ops.precompile import launch

_ROWS = 16
_WHOLE = {"MODE": 0, "BYTES": 0, "GROUPED": False, "ZEROS": False}
"""In place of what a packed weight says."""
_CHUNK = tl.constexpr(16)


@triton.jit
def _plan(
    chosen_ptr, begins_ptr, expert_ptr, order_ptr, pairs, experts, most, per_expert,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    pair, expert, block = tl.arange(0, PAIRS), tl.arange(0, EXPERTS), tl.arange(0, BLOCKS)
    own = tl.load(chosen_ptr + pair, mask=pair < pairs, other=experts).to(tl.int32)
    rank, count = tl.zeros((PAIRS,), dtype=tl.int32), tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, pairs, _CHUNK):
        at = first + tl.arange(0, _CHUNK)
        other = tl.load(chosen_ptr + at, mask=at < pairs, other=experts).to(tl.int32)
        before = (other[None, :] == own[:, None]) & (at[None, :] < pair[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
        count += tl.sum((other[None, :] == expert[:, None]).to(tl.int32), 1)
    blocks = (count + ROWS - 1) // ROWS
    begin = tl.cumsum(blocks, 0) - blocks
    tl.store(begins_ptr + expert, begin, mask=expert < experts)
    tl.store(expert_ptr + block, tl.full((BLOCKS,), -1, dtype=tl.int32), mask=block < most)
    for row in range(ROWS):
        tl.store(order_ptr + block * ROWS + row, tl.full((BLOCKS,), -1, dtype=tl.int32), mask=block < most)
    tl.debug_barrier()  # what is written next replaces some of it
    for number in range(per_expert):
        tl.store(expert_ptr + begin + number, expert, mask=(expert < experts) & (number < blocks))
    start = tl.load(begins_ptr + own, mask=pair < pairs, other=0)
    tl.store(order_ptr + start * ROWS + rank, pair, mask=pair < pairs)


@triton.jit
def _routed(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, order_ptr, expert_ptr, shares_ptr, y_ptr, x_row, w_expert, w_row, groups,
    per_group, rows, outs, inner, per_row,
    GATED: tl.constexpr, KIND: tl.constexpr, SINGLE: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr,
    BYTES: tl.constexpr, GROUPED: tl.constexpr, ZEROS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows x[pair // per_row] times their expert's weight, packed if MODE > 0; GATED: gate and up, else shares."""
    after_others(PDL)
    block, first = tl.program_id(0), tl.program_id(1) * OUT
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if expert >= 0:
        out, row, at = first + tl.arange(0, OUT), tl.arange(0, ROWS), tl.arange(0, 128)
        if SINGLE:
            pair = tl.where(row == 0, block, -1)
        else:
            pair = tl.load(order_ptr + block * ROWS + row)
        there = pair >= 0
        pair = tl.maximum(pair, 0)
        line = tl.minimum(out, outs - 1)
        if MODE > 0:
            line += expert * outs * (2 if GATED else 1)
            total = units(
                w_ptr, w_row, line, scales_ptr, zeros_ptr, x_ptr, x_row, pair // per_row, rows, inner, groups,
                per_group, 0, tl.cdiv(inner, 128), MODE, BYTES, GROUPED, ZEROS, OUT, ROWS, WHOLE, PDL,
            )  # fmt: skip
            up = total
            if GATED:
                up = units(
                    w_ptr, w_row, line + outs, scales_ptr, zeros_ptr, x_ptr, x_row, pair // per_row, rows, inner,
                    groups, per_group, 0, tl.cdiv(inner, 128), MODE, BYTES, GROUPED, ZEROS, OUT, ROWS, WHOLE, PDL,
                )  # fmt: skip
        else:
            w_at = w_ptr + expert * w_expert + line.to(tl.int64)[:, None] * w_row + at[None, :]
            x_at = x_ptr + (pair // per_row)[None, :] * x_row + at[:, None]
            total, up = tl.zeros((OUT, ROWS), dtype=tl.float32), tl.zeros((OUT, ROWS), dtype=tl.float32)
            for step in range(0, inner, 128):
                if WHOLE:
                    x = tl.load(x_at + step)
                    w = tl.load(w_at + step, eviction_policy="evict_first")
                else:
                    inside = at < inner - step
                    x = tl.load(x_at + step, mask=inside[:, None], other=0.0)
                    w = tl.load(w_at + step, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
                total = tl.dot(w, x, total)
                if GATED:
                    if WHOLE:
                        v = tl.load(w_at + outs.to(tl.int64) * w_row + step, eviction_policy="evict_first")
                    else:
                        v = tl.load(w_at + outs.to(tl.int64) * w_row + step, mask=inside[None, :], other=0.0)
                    up = tl.dot(v, x, up)
        type: tl.constexpr = x_ptr.dtype.element_ty
        total = total.to(type).to(tl.float32)  # as products by themselves are rounded
        if GATED:
            total = act(total, KIND)[0] * up.to(type).to(tl.float32)
        else:
            total *= tl.load(shares_ptr + pair).to(tl.float32)[None, :]
        place = y_ptr + pair.to(tl.int64)[None, :] * outs + out[:, None]
        tl.store(place, total.to(y_ptr.dtype.element_ty), mask=there[None, :] & (out < outs)[:, None])


@triton.jit
def _choose(
    logits_ptr, shares_ptr, chosen_ptr, experts, count, NORMALISED: tl.constexpr, EXPERTS: tl.constexpr,
    COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    token, expert, slot = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS), tl.arange(0, COUNT)
    logits = tl.load(logits_ptr + token * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    part = tl.exp(logits - tl.max(logits, 0))
    part = part / tl.sum(part, 0)
    shares, chosen = tl.zeros((COUNT,), dtype=tl.float32) + 0 * tl.sum(part, 0), tl.zeros((COUNT,), dtype=tl.int32)
    part = tl.where(expert < experts, part, -1.0)
    for number in range(count):
        largest = tl.max(part, 0)
        at = tl.minimum(tl.min(tl.where(part == largest, expert, EXPERTS), 0), experts - 1)  # NaN equals nothing
        shares, chosen = tl.where(slot == number, shares + largest, shares), tl.where(slot == number, at, chosen)
        part = tl.where(expert == at, -1.0, part)
    if NORMALISED:
        shares = shares / tl.sum(tl.where(slot < count, shares, 0.0), 0)
    tl.store(shares_ptr + token * count + slot, shares.to(shares_ptr.dtype.element_ty), mask=slot < count)
    tl.store(chosen_ptr + token * count + slot, chosen.to(tl.int64), mask=slot < count)


def choose(logits: Tensor, count: int, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Op `choose_experts`."""
    tokens, experts = logits.shape
    shares = torch.empty(tokens, count, dtype=dtype, device=logits.device)
    chosen = torch.empty(tokens, count, dtype=torch.int64, device=logits.device)
    launch(
        _choose, (tokens,),
        logits, shares, chosen, experts, count, NORMALISED=normalised, EXPERTS=next_power(experts),
        COUNT=next_power(count), num_warps=1 if experts <= 128 else 4, **overlaps(logits.device),
    )  # fmt: skip
    return shares, chosen


@triton.jit
def _combine(found_ptr, y_ptr, width, each, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Sums of the rows of a token's experts."""
    after_others(PDL)
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in range(each):
        total += tl.load(found_ptr + (token * each + number) * width + at, mask=at < width, other=0.0)
    tl.store(y_ptr + token * width + at, total.to(y_ptr.dtype.element_ty), mask=at < width)


def route(
    x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, chosen: Tensor, shares: Tensor, kind: str
) -> Tensor:  # fmt: skip
    """See `routed_experts`: four launches."""
    tokens, each = chosen.shape
    pairs, experts = tokens * each, len(down) if isinstance(down, Tensor) else down.shape[0] // x.shape[1]
    chosen, shares, x = chosen.contiguous(), shares.contiguous(), x.contiguous()
    if tokens == 1:
        most, expert, order = pairs, chosen, chosen
    else:
        most = min(pairs, experts + pairs // _ROWS)
        begins, expert, order = torch.empty(experts + most * (1 + _ROWS), dtype=torch.int32, device=x.device).split(
            [experts, most, most * _ROWS]
        )
        launch(
            _plan, (1,), chosen, begins, expert, order, pairs, experts, most, cdiv(tokens, _ROWS),
            PAIRS=next_power(pairs), EXPERTS=next_power(experts), BLOCKS=next_power(most), ROWS=_ROWS, num_warps=8,
            **overlaps(x.device),
        )  # fmt: skip
    middle = torch.empty(pairs, down.shape[-1], dtype=x.dtype, device=x.device)
    found = torch.empty(pairs, x.shape[1], dtype=torch.float32, device=x.device)
    for rows, weight, result, per_row in ((x, gate_up, middle, each), (middle, down, found, 1)):
        strides: tuple[int, ...]
        outs, width = result.shape[1], rows.shape[1]
        out = 32 if most * cdiv(outs, 64) < 2 * processors(x.device) else 64
        grid = most, cdiv(outs, out)
        if isinstance(weight, PackedWeight):
            parts = weight.data, weight.scales, weight.data if weight.zeros is None else weight.zeros
            strides, shape = (0, weight.data.stride(0), *groups_of(weight)), form(weight)
        else:
            parts, strides, shape = (weight,) * 3, (*weight.stride()[:2], 1, 1), _WHOLE
        launch(
            _routed, grid,
            rows, *parts, order, expert, shares, result, rows.stride(0), *strides, len(rows), outs, width, per_row,
            GATED=rows is x, KIND=KINDS[kind], SINGLE=tokens == 1, WHOLE=width % 128 == 0, OUT=out, ROWS=_ROWS,
            num_warps=4, num_stages=3, **shape, **overlaps(x.device),
        )  # fmt: skip
    y = torch.empty_like(x)
    launch(
        _combine, (tokens, cdiv(x.shape[1], 512)), found, y, x.shape[1], each, BLOCK=512, num_warps=4,
        **overlaps(x.device),
    )  # fmt: skip
    return y
