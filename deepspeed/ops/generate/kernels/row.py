"""One row times a weight of any number of bits, without tensor cores: a thread multiplies what it has loaded."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from deepspeed.ops.model.kernels.common import after_others

# [Note: integers as subnormal numbers] The bits of an integer below 2^24 are those of the float32 number that is 2^-149
# times as large: a mask is all that makes a factor of it. x is taken 2^99 times, and the sum 2^50 times in the end.
LESS = tl.constexpr(2.0**50)


class RowTile(NamedTuple):
    """The shape of a program for one row: rows of the weight, units of a step, warps."""

    out: int
    units: int
    warps: int = 4


@triton.jit
def _x(x_ptr, at, inner, WHOLE: tl.constexpr):
    if WHOLE:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < inner, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _numbers(places, column, unit, first, units, inner, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """What a step reads of the weight; nothing behind the last unit."""
    if WHOLE:
        w = tl.load(places, mask=first < units, other=0, eviction_policy="evict_first")
    else:
        inside = (unit + first < units)[:, None, None]
        if KIND == 1:  # others are padded to whole units
            inside = inside & (first * 128 + column < inner)
        w = tl.load(places, mask=inside[None], other=0, eviction_policy="evict_first")
    return w


@triton.jit
def row_sum(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, line, inner, w_row, groups, per_group,
    KIND: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr,
    OUT: tl.constexpr, UNITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[OUT] float32: x times these lines of a weight, UNITS units of 128 columns in a step; WHOLE if all are full.

    A KIND of 4 is of numbers in words, 8 of bytes, 1 of e4m3.
    """
    LANES: tl.constexpr = 4 if KIND == 4 else 16
    EACH: tl.constexpr = 4 if KIND == 4 else 8
    unit, lane, each = tl.arange(0, UNITS), tl.arange(0, LANES), tl.arange(0, EACH)
    column = unit[:, None, None] * 128 + lane[None, :, None] * EACH + each[None, None, :]
    LOADED: tl.constexpr = 1 if KIND == 8 else EACH  # eight integers are one word
    STEP: tl.constexpr = LANES * LOADED
    along = (unit[:, None, None] * LANES + lane[None, :, None]) * LOADED + tl.arange(0, LOADED)[None, None, :]
    place = line.to(tl.int64)[:, None, None, None] * w_row + along[None]
    group = line[:, None, None] * groups + lane[None, None, :] * 0
    units = tl.cdiv(inner, 128)
    total = tl.zeros((OUT, UNITS, LANES), dtype=tl.float32)
    w = _numbers(w_ptr + place, column, unit, 0, units, inner, KIND, WHOLE)
    after_others(PDL)
    for first in range(0, units, UNITS):
        # What the next step needs is on its way while this one computes.
        later = _numbers(w_ptr + place + (first + UNITS) * STEP, column, unit, first + UNITS, units, inner, KIND, WHOLE)
        at = first * 128 + column
        if KIND == 4:
            found, sum = tl.zeros((OUT, UNITS, LANES, EACH), tl.float32), tl.zeros((UNITS, LANES, EACH), tl.float32)
            for k in tl.static_range(8):
                x = _x(x_ptr, at + 16 * k, inner, WHOLE) * 2.0**99
                bits = (w & (15 << 4 * k)) if k < 6 else ((w >> 8) & (15 << (4 * k - 8)))
                found += bits.to(tl.float32, bitcast=True) * (x * (0.0625**k if k < 6 else 0.0625 ** (k - 2)))[None]
                sum += x
        elif KIND == 8:
            x = _x(x_ptr, at, inner, WHOLE) * 2.0**99
            spot = 8 * tl.minimum(each % 4, 2)
            half = (w >> (32 * (each // 4))[None, None, None, :]).to(tl.int32)
            half = tl.where((each % 4 == 3)[None, None, None, :], half >> 8, half) & (255 << spot)[None, None, None, :]
            less = tl.where(spot == 0, 1.0, tl.where(spot == 8, 2.0**-8, 2.0**-16))
            found, sum = half.to(tl.float32, bitcast=True) * (x * less[None, None, :])[None], x
        else:
            x = _x(x_ptr, at, inner, WHOLE)
            found, sum = w.to(tl.float8e4nv, bitcast=True).to(tl.float32) * x[None], x
        found = tl.sum(found, 3)
        which = group + tl.minimum((first + unit) // per_group, groups - 1)[None, :, None]
        if KIND != 1:
            zero = tl.load(zeros_ptr + which).to(tl.float32) if ZEROS else 1 << (KIND - 1)
            found -= (tl.sum(sum, 2) * 2.0**-149)[None] * zero
        total += found * tl.load(scales_ptr + which).to(tl.float32)
        w = later
    return tl.sum(tl.sum(total, 2), 1) * (1.0 if KIND == 1 else LESS)
