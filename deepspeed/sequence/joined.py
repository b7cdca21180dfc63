"""Results of chunks as one tensor, of which none is there twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["joined"]


def joined(chunks: Iterable[Tensor], length: int) -> Tensor:
    """The chunks one after the other along their first dim, `length` in all; each is written as it comes."""
    whole: Tensor | None = None
    begin = 0
    for chunk in chunks:
        if whole is None:
            whole = chunk.new_empty(length, *chunk.shape[1:])
        whole = _Put.apply(whole, chunk, begin)  # type: ignore[no-untyped-call]
        begin += chunk.shape[0]
        del chunk  # before the next is made
    assert whole is not None, "there are no chunks"
    assert begin == length, f"chunks of {begin} for a length of {length}"
    return whole


class _Put(torch.autograd.Function):
    """Writes into memory that nobody has read, so that its gradient goes through as it is, without a copy."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, chunk: Tensor, begin: int) -> Tensor:
        ctx.rows = slice(begin, begin + chunk.shape[0])
        whole[ctx.rows] = chunk
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0][ctx.rows], None
