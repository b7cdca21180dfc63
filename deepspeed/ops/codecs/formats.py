"""Formats of few bits: what a scaled number becomes, and how codes of a block share bytes.

[Note: planes] A block of L elements is cut into as many lanes as codes share a group of bytes, each of Q = ceil(L /
lanes) elements. Byte i of each plane holds bits of element i of every lane. So neighbouring elements meet neighbouring
bytes in every lane, and nothing has to be rearranged to pack them. The last block of a row may be short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Place = tuple[int, int, int, int]
"""Of a part of rows: where the numbers begin, how many, where their codes begin, and where their scales."""


@dataclass(frozen=True)
class Format:
    """How a number is written whose magnitude is at most `largest`."""

    name: str
    bits: int
    lanes: int
    """Codes that share a group of bytes."""
    largest: float
    exponent: int = 0
    """Bits of the exponent of a small float; 0: an integer, or a dtype of torch."""
    dtype: torch.dtype | None = None
    """The dtype of torch that the bytes are."""

    @property
    def planes(self) -> int:
        """Bytes of a group."""
        return self.lanes * self.bits // 8

    @property
    def inverse(self) -> float:
        """Of `largest`, as a float32."""
        return torch.tensor(1.0 / self.largest, dtype=torch.float32).item()

    @property
    def fraction(self) -> int:
        """Bits of the fraction of a small float."""
        return self.bits - 1 - self.exponent

    @property
    def bias(self) -> int:
        """Of the exponent: such that the largest number is `largest`."""
        return (1 << self.exponent) - math.frexp(self.largest)[1]

    def payload_bytes(self, numel: int, block: int) -> int:
        """Of a row of so many elements."""
        whole, rest = divmod(numel, block)
        return (whole * (block // self.lanes) + -(-rest // self.lanes)) * self.planes

    def codes(self, scaled: Tensor) -> Tensor:
        """int32 codes of float32 numbers, rounded to nearest, ties to even; uint8 where a code is a byte."""
        if self.dtype is not None and not self.dtype.is_floating_point:
            return scaled.round().clamp_(-self.largest, self.largest).to(torch.int8).view(torch.uint8)
        scaled = scaled.clamp(-self.largest, self.largest)
        if self.dtype is not None:
            return scaled.to(self.dtype).view(torch.uint8)
        if self.exponent:
            return self._float_codes(scaled)
        return scaled.round().to(torch.int32) & ((1 << self.bits) - 1)

    def values(self, codes: Tensor) -> Tensor:
        """The float32 numbers of codes."""
        if self.dtype is not None:
            return codes.view(self.dtype).float()
        if self.exponent:
            return self._float_values(codes)
        half = 1 << (self.bits - 1)
        return ((codes ^ half) - half).float()

    def _float_codes(self, scaled: Tensor) -> Tensor:
        bits = scaled.view(torch.int32)
        magnitude, drop = bits & 0x7FFFFFFF, 23 - self.fraction
        rounded = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
        normal = rounded - ((127 - self.bias) << self.fraction)
        small = (scaled.abs() * 2.0 ** (self.bias - 1 + self.fraction)).round().to(torch.int32)
        code = torch.where(normal < (1 << self.fraction), small, normal)
        return code | ((bits >> 31) & 1) << (self.bits - 1)

    def _float_values(self, codes: Tensor) -> Tensor:
        magnitude = codes & ((1 << (self.bits - 1)) - 1)
        normal = ((magnitude << (23 - self.fraction)) + ((127 - self.bias) << 23)).view(torch.float32)
        small = magnitude.float() * 2.0 ** (1 - self.bias - self.fraction)
        value = torch.where(magnitude < (1 << self.fraction), small, normal)
        return torch.where((codes >> (self.bits - 1)) & 1 == 1, -value, value)


FORMATS = {
    each.name: each
    for each in (
        Format("int8", 8, 1, 127.0, dtype=torch.int8),
        Format("int4", 4, 2, 7.0),
        Format("fp8_e4m3", 8, 1, 448.0, dtype=torch.float8_e4m3fn),
        Format("fp8_e5m2", 8, 1, 57344.0, dtype=torch.float8_e5m2),
        Format("fp4", 4, 2, 6.0, exponent=2),
        Format("fp6", 6, 4, 28.0, exponent=3),
        Format("fp12", 12, 2, 1.9375 * 2**20, exponent=7),
    )
}


def pack(codes: Tensor, bits: int) -> Tensor:
    """`[..., lanes, Q]` codes to `[..., planes, Q]` bytes."""
    lanes = codes.unbind(-2)
    return torch.stack([plane & 0xFF for plane in _PACK[bits](*lanes)], -2).to(torch.uint8)


def unpack(data: Tensor, bits: int) -> Tensor:
    """`[..., planes, Q]` bytes to `[..., lanes, Q]` int32 codes."""
    return torch.stack(_UNPACK[bits](*data.to(torch.int32).unbind(-2)), -2)


_PACK: dict[int, Callable[..., tuple[Tensor, ...]]] = {
    1: lambda *bits: (sum(bit << place for place, bit in enumerate(bits)),),
    2: lambda a, b, c, d: (a | b << 2 | c << 4 | d << 6,),
    4: lambda a, b: (a | b << 4,),
    6: lambda a, b, c, d: (a | (d & 3) << 6, b | (d >> 2 & 3) << 6, c | (d >> 4) << 6),
    12: lambda a, b: (a, b, a >> 8 | b >> 8 << 4),
}
_UNPACK: dict[int, Callable[..., tuple[Tensor, ...]]] = {
    1: lambda p: tuple(p >> place & 1 for place in range(8)),
    2: lambda p: (p & 3, p >> 2 & 3, p >> 4 & 3, p >> 6),
    4: lambda p: (p & 15, p >> 4),
    6: lambda p, q, r: (p & 63, q & 63, r & 63, p >> 6 | q >> 6 << 2 | r >> 6 << 4),
    12: lambda p, q, r: (p | (r & 15) << 8, q | (r >> 4) << 8),
}
