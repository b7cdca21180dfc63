"""The choice of tokens; see [Note: draws].

[Note: thresholds] Top-k and top-p need the least logit that is kept. A launch has a program for each chunk of a row,
which counts, or adds the exponents of, what is above each of eight bounds. The next launch adds up the chunks and takes
eight bounds within the gap that remains, so that seven launches tell logits apart that differ by 2e-5. What is 40 below
the largest logit has no part in a sum of float32 and is dropped. All sums have a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import cdiv, next_power
from deepspeed.ops.precompile import launch

if TYPE_CHECKING:
    from deepspeed.ops.generate.sampling import SamplingTensors

BLOCK, WARPS = 4096, 8
PASSES = 7
BOUNDS = tl.constexpr(8)
STATE = tl.constexpr(8)
"""Numbers of a row between passes: low, high, counts above both, what is wanted, the largest logit."""


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _gumbel(token, first, second):
    bits = _mixed(_mixed(token.to(tl.uint32) * 0x9E3779B1 + first) ^ second)
    small = bits < 16777216
    at = tl.where(small, bits.to(tl.float32) + 0.5, (bits >> 8).to(tl.float32) * 256.0 + 128.0) * 2.3283064365386963e-10
    series = at * (1.0 + at * (0.5 + at * (0.3333333333333333 + at * 0.25)))
    return -tl.log(tl.where(at < 0.015625, series, -tl.log(1.0 - at)))


@triton.jit
def _keys_of(seed, offset):
    first = _mixed((seed & 0xFFFFFFFF).to(tl.uint32) ^ 0x9E3779B9) + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = _mixed(_mixed(first) + (offset & 0xFFFFFFFF).to(tl.uint32))
    return first, _mixed(first ^ 0x7F4A7C15)


@triton.jit
def _chunk(
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, temperature_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, tokens, row_stride,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, COUNTS: tl.constexpr,
    PROMPT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(ids, logits as they are, logits with penalties, bias and mask divided by the temperature) of a chunk."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = at < tokens, row * tokens + at
    raw = tl.load(logits_ptr + row * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    x = raw
    if COUNTS:
        count = tl.load(counts_ptr + place, mask=inside, other=0)
        if REPETITION:
            known = count > 0
            if PROMPT:
                known = known | (tl.load(prompt_ptr + place, mask=inside, other=0) != 0)
            penalty = tl.load(repetition_ptr + row)
            x = tl.where(known, tl.where(x < 0, x * penalty, x / penalty), x)
        if FREQUENCY:
            x -= tl.load(frequency_ptr + row) * count.to(tl.float32)
        if PRESENCE:
            x -= tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
    if BIAS:
        x += tl.load(bias_ptr + place, mask=inside, other=0.0)
    if MASK:
        x = tl.where(tl.load(mask_ptr + place, mask=inside, other=0) != 0, x, float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    return at, raw, x / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _survey(
    tops_ptr, sums_ptr, best_ptr, ids_ptr,
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, temperature_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, tokens, row_stride,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, COUNTS: tl.constexpr,
    PROMPT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each chunk: the largest logit, the sum of exponents below it, the largest changed logit and its id."""
    _, raw, x = _chunk(
        logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, temperature_ptr, repetition_ptr, presence_ptr,
        frequency_ptr, tokens, row_stride, REPETITION, PRESENCE, FREQUENCY, COUNTS, PROMPT, BIAS, MASK, BLOCK,
    )  # fmt: skip
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    top = tl.max(raw, 0)
    tl.store(tops_ptr + place, top)
    tl.store(sums_ptr + place, tl.sum(tl.exp(raw - tl.where(top == float("-inf"), 0.0, top)), 0))
    best, which = tl.max(x, 0, return_indices=True)
    tl.store(best_ptr + place, best)
    tl.store(ids_ptr + place, tl.program_id(1) * BLOCK + which)


@triton.jit
def _bounds(low, high):
    return low + tl.arange(0, BOUNDS) * ((high - low) / BOUNDS)


@triton.jit
def _settled(state_ptr, counts_ptr, masses_ptr, limit_ptr, FIRST: tl.constexpr, BY_MASS: tl.constexpr,
             CHUNKS: tl.constexpr):  # fmt: skip
    """(low, high, count above low, count above high, wanted, top) of a row after a pass that found these sums."""
    row, chunks = tl.program_id(0), tl.num_programs(1)
    state_ptr += row * STATE
    low, high, upto = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    above, wanted, top = tl.load(state_ptr + 3), tl.load(state_ptr + 4), tl.load(state_ptr + 5)
    if upto - above > 1:
        chunk, bound = tl.arange(0, CHUNKS), tl.arange(0, BOUNDS)
        place = (row * chunks + chunk[:, None]) * BOUNDS + bound[None, :]
        inside = (chunk < chunks)[:, None] & (bound < BOUNDS)[None, :]
        counts = tl.sum(tl.load(counts_ptr + place, mask=inside, other=0.0), 0)
        values = counts
        if BY_MASS:
            values = tl.sum(tl.load(masses_ptr + place, mask=inside, other=0.0), 0)
            if FIRST:
                wanted = tl.load(limit_ptr + row) * tl.max(values, 0)  # at the lowest bound it is all of the row
        enough, tried = (values >= wanted) | (bound == 0), _bounds(low, high)
        low = tl.maximum(low, tl.max(tl.where(enough, tried, low), 0))
        high = tl.min(tl.where(enough, high, tried), 0)
        upto = tl.min(tl.where(enough, counts, upto), 0)
        above = tl.max(tl.where(enough, above, counts), 0)
    return low, high, upto, above, wanted, top


@triton.jit
def _narrow(
    best_ptr, limit_ptr, before_limit_ptr, state_ptr, counted_ptr, massed_ptr, next_state_ptr, next_counted_ptr,
    next_massed_ptr,
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, temperature_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, tokens, row_stride,
    NEW: tl.constexpr, AFTER: tl.constexpr, FIRST: tl.constexpr, BY_MASS: tl.constexpr, CHUNKS: tl.constexpr,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, COUNTS: tl.constexpr,
    PROMPT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass: a `NEW` search, which may come `AFTER` that of top-k, or the next one of it; `FIRST` is the second."""
    row, chunks = tl.program_id(0), tl.num_programs(1)
    if tl.load(temperature_ptr + row) <= 0:
        return
    if NEW:
        if AFTER:
            low, high, upto, above, wanted, top = _settled(
                state_ptr, counted_ptr, massed_ptr, before_limit_ptr, False, False, CHUNKS
            )
        else:
            chunk = tl.arange(0, CHUNKS)
            top = tl.max(tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), 0)
            low = tl.full((), float("-inf"), tl.float32)
        wanted = tl.load(limit_ptr + row).to(tl.float32)
        needed = (wanted < 1) if BY_MASS else ((wanted > 0) & (wanted < tokens))
        needed = needed & (top > float("-inf")) & (top < float("inf"))
        low = tl.where(needed, tl.maximum(low, top - 40.0), low)
        high, above, upto = top + 0.01, 0.0, tl.where(needed, 1e9, 0.0)
    else:
        low, high, upto, above, wanted, top = _settled(
            state_ptr, counted_ptr, massed_ptr, limit_ptr, FIRST, BY_MASS, CHUNKS
        )
    if tl.program_id(1) == 0:
        state = next_state_ptr + row * STATE
        tl.store(state, low)
        tl.store(state + 1, high)
        tl.store(state + 2, upto)
        tl.store(state + 3, above)
        tl.store(state + 4, wanted)
        tl.store(state + 5, top)
    if upto - above > 1:
        _, _, x = _chunk(
            logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, temperature_ptr, repetition_ptr, presence_ptr,
            frequency_ptr, tokens, row_stride, REPETITION, PRESENCE, FREQUENCY, COUNTS, PROMPT, BIAS, MASK, BLOCK,
        )  # fmt: skip
        kept = x[:, None] >= _bounds(low, high)[None, :]
        place = (row * chunks + tl.program_id(1)) * BOUNDS + tl.arange(0, BOUNDS)
        tl.store(next_counted_ptr + place, tl.sum(kept.to(tl.float32), 0))
        if BY_MASS:
            tl.store(next_massed_ptr + place, tl.sum(tl.where(kept, tl.exp(x - top)[:, None], 0.0), 0))


@triton.jit
def _choose(
    best_ptr, limit_ptr, state_ptr, counted_ptr, massed_ptr, min_p_ptr, seeds_ptr, offsets_ptr, drawn_ptr, ids_ptr,
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, temperature_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, tokens, row_stride,
    AFTER: tl.constexpr, BY_MASS: tl.constexpr, MIN_P: tl.constexpr, CHUNKS: tl.constexpr,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, COUNTS: tl.constexpr,
    PROMPT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each chunk the largest sum of a kept logit and its Gumbel number, and its id."""
    row, chunks = tl.program_id(0), tl.num_programs(1)
    if tl.load(temperature_ptr + row) <= 0:
        return
    at, _, x = _chunk(
        logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, temperature_ptr, repetition_ptr, presence_ptr,
        frequency_ptr, tokens, row_stride, REPETITION, PRESENCE, FREQUENCY, COUNTS, PROMPT, BIAS, MASK, BLOCK,
    )  # fmt: skip
    least = tl.full((), float("-inf"), tl.float32)
    if AFTER:
        least = _settled(state_ptr, counted_ptr, massed_ptr, limit_ptr, False, BY_MASS, CHUNKS)[0]
    if MIN_P:
        chunk = tl.arange(0, CHUNKS)
        top = tl.max(tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), 0)
        least = tl.maximum(least, top + tl.log(tl.load(min_p_ptr + row)))
    first, second = _keys_of(tl.load(seeds_ptr + row), tl.load(offsets_ptr + row))
    kept = (x >= least) & (x > float("-inf"))
    best, which = tl.max(tl.where(kept, x + _gumbel(at, first, second), float("-inf")), 0, return_indices=True)
    place = row * chunks + tl.program_id(1)
    tl.store(drawn_ptr + place, best)
    tl.store(ids_ptr + place, tl.program_id(1) * BLOCK + which)


@triton.jit
def _finish(
    logits_ptr, temperature_ptr, tops_ptr, sums_ptr, best_ptr, ids_ptr, drawn_ptr, drawn_ids_ptr, out_ptr, chance_ptr,
    total_ptr, chunks, row_stride, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    place, inside = row * chunks + chunk, chunk < chunks
    tops = tl.load(tops_ptr + place, mask=inside, other=float("-inf"))
    highest = tl.max(tops, 0)
    sums = tl.load(sums_ptr + place, mask=inside, other=0.0) * tl.exp(tops - highest)
    total = highest + tl.log(tl.sum(sums, 0))
    bests = tl.load(best_ptr + place, mask=inside, other=float("-inf"))
    top, which = tl.max(bests, 0, return_indices=True)
    token = tl.load(ids_ptr + row * chunks + which)
    if tl.load(temperature_ptr + row) > 0:
        drawn = tl.load(drawn_ptr + place, mask=inside, other=float("-inf"))
        _, which = tl.max(drawn, 0, return_indices=True)
        token = tl.load(drawn_ids_ptr + row * chunks + which)
    failed = (total != total) | (total == float("inf")) | (top == float("-inf")) | (top == float("inf"))
    token = tl.where(failed, 0, token)
    chance = tl.load(logits_ptr + row.to(tl.int64) * row_stride + token).to(tl.float32) - total
    tl.store(out_ptr + row, token.to(tl.int64))
    tl.store(chance_ptr + row, tl.where(failed, float("nan"), chance))
    tl.store(total_ptr + row, total)


def draw(logits: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Op `sample`."""
    (rows, tokens), device = logits.shape, logits.device
    chunks = cdiv(tokens, BLOCK)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    chance, total = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    tops, sums, best, drawn = torch.empty(4, rows, chunks, dtype=torch.float32, device=device)
    ids, drawn_ids = torch.empty(2, rows, chunks, dtype=torch.int32, device=device)
    given = (tensors.repetition, tensors.presence, tensors.frequency)
    wide = [None if x is None else x.contiguous() for x in (tensors.counts, tensors.prompt, tensors.bias, tensors.mask)]
    wide = [x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for x in wide]
    names = ("REPETITION", "PRESENCE", "FREQUENCY", "COUNTS", "PROMPT", "BIAS", "MASK")
    options: dict[str, Any] = {name: x is not None for name, x in zip(names, (*given, *wide), strict=True)}
    options |= {"BLOCK": BLOCK, "num_warps": WARPS}
    row = [
        logits, *(total if x is None else x for x in wide), tensors.temperature,
        *(total if x is None else x for x in given), tokens, logits.stride(0),
    ]  # fmt: skip
    many = next_power(chunks)
    launch(_survey, (rows, chunks), tops, sums, best, ids, *row, **options)
    searches = [(limit, mass) for limit, mass in ((tensors.top_k, False), (tensors.top_p, True)) if limit is not None]
    state, counted, massed = _places(rows, chunks, best)
    for at, (limit, mass) in enumerate(searches):
        for turn in range(PASSES):
            later = _places(rows, chunks, best)
            launch(
                _narrow, (rows, chunks), best, limit, searches[0][0], state, counted, massed, *later, *row,
                NEW=turn == 0, AFTER=at > 0, FIRST=turn == 1, BY_MASS=mass, CHUNKS=many, **options,
            )  # fmt: skip
            state, counted, massed = later
    launch(
        _choose, (rows, chunks), best, searches[-1][0] if searches else best, state, counted, massed,
        total if tensors.min_p is None else tensors.min_p, tensors.seeds, tensors.offsets, drawn, drawn_ids, *row,
        AFTER=bool(searches), BY_MASS=bool(searches) and searches[-1][1], MIN_P=tensors.min_p is not None,
        CHUNKS=many, **options,
    )  # fmt: skip
    launch(
        _finish, (rows,), logits, tensors.temperature, tops, sums, best, ids, drawn, drawn_ids, out, chance, total,
        chunks, logits.stride(0), CHUNKS=many, num_warps=1,
    )  # fmt: skip
    return out, chance, total


def _places(rows: int, chunks: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what a pass leaves to the next: states of rows, counts and sums of chunks."""
    state, counted, massed = like.new_empty(rows * (STATE.value + 2 * chunks * BOUNDS.value)).split(
        [rows * STATE.value, *[rows * chunks * BOUNDS.value] * 2]
    )
    return state, counted, massed
