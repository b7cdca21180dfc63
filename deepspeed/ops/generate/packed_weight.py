"""`PackedWeight`: a weight in few bits, as it lies in memory.

[Note: packed layouts] The inner dim of a weight is padded to whole units of 128 columns.

w8a16     a byte each: number + zero
w4a16     64 bytes a unit, 16 words of 32 bits: column 16k + i is in bits 4k to 4k + 3 of word i
wf6af16   96 bytes a unit: 64 with the low four bits, column j in the low half of byte j and column j + 64 in the high
          half, then 32: bits 2q and 2q + 1 of byte j are the high two bits of column j + 32q.
          A number has a sign, 3 bits of exponent (bias 3) and 2 of fraction, none is infinite.
fp8       e4m3, not padded, one scale for each row

So what a kernel reads of a unit is contiguous, and what it takes out of one load multiplies contiguous columns of x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

UNIT = 128
"""Columns that are packed together; a group is a multiple of it."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] in few bits; see [Note: packed layouts]."""

    mode: str
    data: Tensor
    """[out, bytes]"""
    scales: Tensor
    """[out, groups] bfloat16; of mode fp8 [out, 1] float32."""
    zeros: Tensor | None
    """[out, groups] uint8: the code of zero, where it is not the middle."""
    shape: tuple[int, int]
    group_size: int
    """Columns of a scale; 0 for a scale of each row."""
    symmetric: bool

    def part(self, rows: slice | Tensor) -> PackedWeight:
        """The weight of some outputs."""
        data, zeros = self.data[rows], None if self.zeros is None else self.zeros[rows]
        return replace(self, data=data, scales=self.scales[rows], zeros=zeros, shape=(len(data), self.shape[1]))


ExpertWeight = Tensor | PackedWeight
"""The weights of experts: [experts, out, in], or packed with the rows of all of them, one after the other."""
