"""What is added to the scores of a key, such as a bias by distance (ALiBi), for attention that knows no biases.

[Note: a bias is a column] A number that belongs to a key and not to a pair becomes one more element of the key, which
one more element of every query multiplies: the product of both is then the score with its bias. So any kernel computes
it, over any keys that a rank has, without scores or masks of length × length.
"""

from __future__ import annotations

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

    def widen(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors whose attention is that with the bias, in the first elements of its results' width."""
        heads, width = query.shape[1], query.shape[-1]
        repeats = heads // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        # Two elements whose sum is the factor, which 16 bits may not hold.
        most = torch.tensor(self.times, dtype=torch.float64).to(query.dtype)
        rest = torch.tensor(self.times - float(most)).to(query.dtype)
        factors = torch.stack([most, rest]).to(query.device).expand(*query.shape[:3], 2)
        values = self.values.to(key.dtype)[..., None].expand(*key.shape[:3], 2)
        wider = -(-(width + 2) // _MULTIPLE) * _MULTIPLE
        query = functional.pad(torch.cat([query, factors], -1), (0, wider - width - 2))
        key = functional.pad(torch.cat([key, values], -1), (0, wider - width - 2))
        return query, key, functional.pad(value, (0, wider - value.shape[-1]))
