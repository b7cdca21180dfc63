"""What is added to the scores of a key, such as a bias by distance (ALiBi), for attention that knows no biases.

[Note: a bias is a column] A number that belongs to a key and not to a pair becomes one more element of the key, which
one more element of every query multiplies: the product of both is then the score with its bias. So any kernel computes
it, over any keys that a rank has, without scores or masks of length × length. Where keys have 16 bits, three elements
hold the 24 bits of a bias in float32: biases of neighbours far from the begin differ in the last of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.sequence.order import TokenOrder

__all__ = ["KeyBias"]

_MULTIPLE = 8  # of the width of a head: flash kernels want it


@dataclass(frozen=True, eq=False)
class KeyBias:
    """`times` × `values` is added to products of queries and keys before they are scaled."""

    values: Tensor
    """[batch or 1, query heads, keys of the whole sequence]."""
    times: float = 1.0

    def of_heads(self, counts: tuple[int, ...], rank: int) -> KeyBias:
        """That of a rank's heads; `counts` are those of each rank."""
        first = sum(counts[:rank])
        return KeyBias(self.values[:, first : first + counts[rank]], self.times)

    def on_ring(self, order: TokenOrder, position: int) -> KeyBias:
        """That of the keys at a position of a ring."""
        at = order.on_ring(self.values.shape[-1], position).to(self.values.device)
        return KeyBias(self.values.index_select(-1, at), self.times)

    def last(self, count: int) -> KeyBias:
        """That of the last keys alone."""
        return KeyBias(self.values[..., -count:], self.times)

    def widen(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors whose attention is that with the bias, in the first elements of its results' width."""
        heads, width = query.shape[1], query.shape[-1]
        repeats = heads // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        fraction, exponent = math.frexp(self.times)  # a power of two is exact in the queries, however large it is
        pieces = _pieces(self.values.double() * fraction, key.dtype).expand(*key.shape[:3], -1)
        factors = query.new_tensor(2.0**exponent).expand(*query.shape[:3], pieces.shape[-1])
        wider = -(-(width + pieces.shape[-1]) // _MULTIPLE) * _MULTIPLE
        query = functional.pad(torch.cat([query, factors], -1), (0, wider - width - pieces.shape[-1]))
        key = functional.pad(torch.cat([key, pieces], -1), (0, wider - width - pieces.shape[-1]))
        return query, key, functional.pad(value, (0, wider - value.shape[-1]))


def _pieces(values: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., pieces], numbers of a dtype whose sums are the values as float32 holds them."""
    found = []
    for _ in range(1 if dtype.itemsize >= 4 else 3):
        found.append(values.to(dtype))
        values = values - found[-1].double()
    return torch.stack(found, -1)
