"""Moments in 8 bits: a small float per element, and one power of two per block of elements.

A moment that is never negative (Adam's second) has 5 bits of exponent and 3 of fraction, any other a sign, 4 and 3.
Exponents count down from the block's largest element, so that a block spans 2^31, or 2^15 with a sign.

[Note: why so] The second moment moves by a thousandth of itself per step, far less than the distance of two codes:
rounded to nearest it would never move again. So steps round up or down at random, with the odds that make the mean
right. That does no harm only if a value that did not move stays what it is. Hence the scale is a power of two: codes
then denote the same numbers under every scale, while a scale of any value would shift all of them a little at every
step. Randomness comes from a hash of the element's index and the step, so that a step does not depend on threads,
and a repeated one gives the same bits. A second moment above zero never becomes zero: its update would be huge.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""

_FRACTION = 20  # bits of a float32 that a code has not
_WORD = 0xFFFFFFFF
_TOP = {True: 15, False: 31}  # the largest exponent of a code, by whether it has a sign
_INFINITY = 0x7F800000


def blocks(numel: int) -> int:
    """How many scales so many elements have."""
    return -(-numel // BLOCK)


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 values of codes."""
    wide = codes.view(-1).to(torch.int32)
    magnitude = wide & 0x7F if signed else wide
    bits = (magnitude + ((127 - _TOP[signed]) << 3)) << _FRACTION
    values = torch.where(magnitude == 0, 0.0, bits.view(torch.float32))
    if signed:
        values = torch.where(wide >= 0x80, -values, values)
    return values * _spread(scales, values.numel())


def encode(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool, dither: Tensor | None = None) -> None:
    """Write float32 values as codes; `dither` is what `dither()` gives, without it values are rounded to nearest."""
    flat = values.reshape(-1)
    if not flat.numel():
        return
    bits = flat.abs().view(torch.int32)
    padded = torch.nn.functional.pad(bits, (0, scales.numel() * BLOCK - bits.numel()))
    largest = padded.view(-1, BLOCK).amax(1).clamp(max=_INFINITY)  # of bits: a NaN is larger than anything
    # The largest code stands for 1.875 times the scale: what is above that has twice the scale.
    scales.copy_(((largest + (1 << _FRACTION) - 1) & _INFINITY).view(torch.float32))
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    scaled = (flat.abs() * _spread(inverse, flat.numel())).view(torch.int32)
    added = 1 << (_FRACTION - 1) if dither is None else dither
    rounded = (scaled + added) >> _FRACTION
    lowest = (127 - _TOP[signed]) << 3
    if signed:
        code = (rounded.clamp(min=lowest) - lowest) & 0x7F | torch.where(flat.view(torch.int32) < 0, 0x80, 0)
    else:
        code = torch.maximum(rounded, lowest + scaled.clamp(max=1)) - lowest & 0xFF
    codes.view(-1).copy_(code)


def dither(numel: int, step: int, *, signed: bool, device: torch.device | None = None) -> Tensor:
    """What a step adds below the last bit of a code, for each element; the two kinds take different bits of a hash."""
    word = (torch.arange(numel, device=device) * 0x9E3779B1 + step * 0x85EBCA77) & _WORD
    word = ((word ^ (word >> 15)) * 0x7FEB352D) & _WORD
    return (word >> 12 if signed else word >> 8 & 0xFFFFF).to(torch.int32)


def _spread(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:numel]
