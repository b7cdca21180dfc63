"""The choice of tokens: a program for each row of logits, which reads it a few times; see [Note: draws].

Top-k and top-p need the least logit that is kept. Floats have the order of integers of as many bits, so a search over
these finds it: each pass over the row tries seven candidates, and the search ends as soon as one token decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.precompile import launch

if TYPE_CHECKING:
    from deepspeed.ops.generate.sampling import SamplingTensors

BLOCK, WARPS = 4096, 16


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
def _scores(
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, at, inside, repetition, presence, frequency, heat,
    COUNTS: tl.constexpr, PROMPT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """float32 logits with penalties, bias and mask, divided by the temperature."""
    x = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    if COUNTS:
        count = tl.load(counts_ptr + at, mask=inside, other=0)
        known = count > 0
        if PROMPT:
            known = known | (tl.load(prompt_ptr + at, mask=inside, other=0) != 0)
        x = tl.where(known, tl.where(x < 0, x * repetition, x / repetition), x)
        x -= frequency * count.to(tl.float32)
        x -= tl.where(count > 0, presence, 0.0)
    if BIAS:
        x += tl.load(bias_ptr + at, mask=inside, other=0.0)
    if MASK:
        x = tl.where(tl.load(mask_ptr + at, mask=inside, other=0) != 0, x, float("-inf"))
    return x / heat


@triton.jit
def _number(key):
    """The float32 at this place of their order."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _place(x):
    """The place of a float32 in their order, int64."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _least(
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, tokens, repetition, presence, frequency, heat,
    top, floor, wanted, BY_MASS: tl.constexpr,
    COUNTS: tl.constexpr, PROMPT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest number so that what is not below it has the `wanted` count, or part of the sum of exponents.

    Only what is not below `floor` is counted in the sum.
    """
    if BY_MASS:
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, tokens, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _scores(
                logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, at, at < tokens, repetition, presence,
                frequency, heat, COUNTS, PROMPT, BIAS, MASK,
            )  # fmt: skip
            mass += tl.where(x >= floor, tl.exp(x - top), 0.0)
        wanted = wanted * tl.sum(mass, 0)
        floor = tl.maximum(floor, top - 40.0)  # what is below has no part in a float32 sum
    low, high = _place(floor), _place(top) + 1  # enough at low, too little at high
    above, upto = tl.zeros((), dtype=tl.int32), tl.zeros((), dtype=tl.int32) + tokens
    eighth = tl.arange(0, 8)
    while (high - low > 1) & (upto - above > 1):
        step = tl.maximum((high - low) // 8, 1)
        tried = tl.where(eighth == 0, low, tl.minimum(low + eighth * step, high - 1))
        bounds = _number(tried)
        counts, masses = tl.zeros((8,), dtype=tl.int32), tl.zeros((8,), dtype=tl.float32)
        for start in range(0, tokens, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _scores(
                logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, at, at < tokens, repetition, presence,
                frequency, heat, COUNTS, PROMPT, BIAS, MASK,
            )  # fmt: skip
            kept = x[:, None] >= bounds[None, :]
            counts += tl.sum(kept.to(tl.int32), 0)
            if BY_MASS:
                masses += tl.sum(tl.where(kept, tl.exp(x - top)[:, None], 0.0), 0)
        if BY_MASS:
            enough = masses >= wanted
        else:
            enough = counts >= wanted.to(tl.int32)
        enough = enough | (eighth == 0)
        low = tl.max(tl.where(enough, tried, low), 0)
        upto = tl.min(tl.where(enough, counts, upto), 0)
        above = tl.max(tl.where(enough, above, counts), 0)
        high = tl.min(tl.where(enough, high, tried), 0)
    return _number(low)


@triton.jit
def _survey(
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, tokens, repetition, presence, frequency, heat,
    COUNTS: tl.constexpr, PROMPT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(logarithm of the sum of exponents of the logits as they are, the largest changed one, its token)."""
    above, sums = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    top, token = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32)
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < tokens
        raw = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(above, raw)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(above - base) + tl.exp(raw - base)
        above = higher
        x = _scores(
            logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, at, inside, repetition, presence, frequency, heat,
            COUNTS, PROMPT, BIAS, MASK,
        )  # fmt: skip
        best, place = tl.max(x, 0, return_indices=True)
        token = tl.where(best > top, start + place, token)
        top = tl.maximum(top, best)
    highest = tl.max(above, 0)
    return highest + tl.log(tl.sum(sums * tl.exp(above - highest), 0)), top, token


@triton.jit
def _choose(
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, tokens, repetition, presence, frequency, heat,
    least, first, second, token,
    COUNTS: tl.constexpr, PROMPT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token drawn among those that are not below `least`."""
    chosen = tl.full((), float("-inf"), tl.float32)
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scores(
            logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, at, at < tokens, repetition, presence,
            frequency, heat, COUNTS, PROMPT, BIAS, MASK,
        )  # fmt: skip
        kept = (x >= least) & (x > float("-inf"))
        best, place = tl.max(tl.where(kept, x + _gumbel(at, first, second), float("-inf")), 0, return_indices=True)
        token = tl.where(best > chosen, start + place, token)
        chosen = tl.maximum(chosen, best)
    return token


@triton.jit
def _draw(
    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, temperature_ptr, seeds_ptr, offsets_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, chance_ptr, total_ptr,
    tokens, row_stride,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, TOP_K: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, COUNTS: tl.constexpr, PROMPT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    counts_ptr, prompt_ptr = counts_ptr + row * tokens, prompt_ptr + row * tokens
    bias_ptr, mask_ptr = bias_ptr + row * tokens, mask_ptr + row * tokens
    repetition = tl.load(repetition_ptr + row) if REPETITION else 1.0
    presence = tl.load(presence_ptr + row) if PRESENCE else 0.0
    frequency = tl.load(frequency_ptr + row) if FREQUENCY else 0.0
    temperature = tl.load(temperature_ptr + row)
    heat = tl.where(temperature > 0, temperature, 1.0)
    total, top, token = _survey(
        logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, tokens, repetition, presence, frequency, heat,
        COUNTS, PROMPT, BIAS, MASK, BLOCK,
    )  # fmt: skip
    if (temperature > 0) & (top > float("-inf")) & (top < float("inf")) & (total == total):
        least = tl.full((), float("-inf"), tl.float32)
        if TOP_K:
            count = tl.load(top_k_ptr + row).to(tl.int32)
            if (count > 0) & (count < tokens):
                least = _least(
                    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, tokens, repetition, presence, frequency,
                    heat, top, least, count.to(tl.float32), False, COUNTS, PROMPT, BIAS, MASK, BLOCK,
                )  # fmt: skip
        if TOP_P:
            share = tl.load(top_p_ptr + row)
            if share < 1:
                least = _least(
                    logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, tokens, repetition, presence, frequency,
                    heat, top, least, share, True, COUNTS, PROMPT, BIAS, MASK, BLOCK,
                )  # fmt: skip
        if MIN_P:
            least = tl.maximum(least, top + tl.log(tl.load(min_p_ptr + row)))
        first, second = _keys_of(tl.load(seeds_ptr + row), tl.load(offsets_ptr + row))
        token = _choose(
            logits_ptr, counts_ptr, prompt_ptr, bias_ptr, mask_ptr, tokens, repetition, presence, frequency, heat,
            least, first, second, token, COUNTS, PROMPT, BIAS, MASK, BLOCK,
        )  # fmt: skip
    failed = (total != total) | (total == float("inf")) | (top == float("-inf")) | (top == float("inf"))
    token = tl.where(failed, 0, token)
    chance = tl.load(logits_ptr + token).to(tl.float32) - total
    tl.store(out_ptr + row, token.to(tl.int64))
    tl.store(chance_ptr + row, tl.where(failed, float("nan"), chance))
    tl.store(total_ptr + row, total)


def draw(logits: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Op `sample`."""
    rows, tokens = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chance, total = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    given = (
        tensors.repetition, tensors.presence, tensors.frequency, tensors.top_k, tensors.top_p, tensors.min_p
    )  # fmt: skip
    wide = [None if x is None else x.contiguous() for x in (tensors.counts, tensors.prompt, tensors.bias, tensors.mask)]
    wide = [x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for x in wide]
    launch(
        _draw, (rows,),
        logits, *(total if x is None else x for x in wide), tensors.temperature, tensors.seeds, tensors.offsets,
        *(total if x is None else x for x in given), out, chance, total, tokens, logits.stride(0),
        REPETITION=given[0] is not None, PRESENCE=given[1] is not None, FREQUENCY=given[2] is not None,
        TOP_K=given[3] is not None, TOP_P=given[4] is not None, MIN_P=given[5] is not None,
        COUNTS=wide[0] is not None, PROMPT=wide[1] is not None, BIAS=wide[2] is not None, MASK=wide[3] is not None,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out, chance, total
