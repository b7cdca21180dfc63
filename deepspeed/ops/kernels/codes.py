"""Moments in 8 bits inside a kernel; `ops/blockwise.py` says what codes are and why: this is the same arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode", "encode"]


@triton.jit
def decode(codes, SIGNED: tl.constexpr):
    """The values of codes under a scale of 1."""
    wide = codes.to(tl.int32)
    magnitude = wide
    lowest = 768  # (127 - 31) << 3
    if SIGNED:
        magnitude = wide & 0x7F
        lowest = 896  # (127 - 15) << 3
    values = tl.where(magnitude == 0, 0.0, ((magnitude + lowest) << 20).to(tl.float32, bitcast=True))
    if SIGNED:
        values = tl.where(wide >= 0x80, -values, values)
    return values


@triton.jit
def encode(values, inside, at, step, SIGNED: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    """(codes, the scale of every SHARE elements), rounded up or down at random by the element's index and the step."""
    word = at.to(tl.uint32) * 0x9E3779B1 + step.to(tl.uint32) * 0x85EBCA77
    word = (word ^ (word >> 15)) * 0x7FEB352D
    magnitudes = tl.where(inside, tl.abs(values), 0.0)
    bits = tl.reshape(magnitudes.to(tl.int32, bitcast=True), (BLOCK // SHARE, SHARE))
    largest = tl.minimum(tl.max(bits, axis=1), 0x7F800000)  # of bits: a NaN is larger than anything
    # The largest code stands for 1.875 times the scale: what is above that has twice the scale.
    scales = ((largest + 0xFFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    inverse = tl.where(scales > 0, 1.0 / scales, 0.0)
    scaled = tl.reshape(magnitudes, (BLOCK // SHARE, SHARE)) * inverse[:, None]
    scaled = tl.reshape(scaled, (BLOCK,)).to(tl.int32, bitcast=True)
    if SIGNED:
        rounded = (scaled + (word >> 12).to(tl.int32)) >> 20
        code = (tl.maximum(rounded, 896) - 896) & 0x7F
        code = tl.where(values.to(tl.int32, bitcast=True) < 0, code | 0x80, code)
    else:
        rounded = (scaled + ((word >> 8) & 0xFFFFF).to(tl.int32)) >> 20
        code = (tl.maximum(rounded, 768 + tl.minimum(scaled, 1)) - 768) & 0xFF
    return code.to(tl.uint8), scales
