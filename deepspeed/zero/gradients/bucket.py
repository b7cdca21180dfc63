"""Gradients that travel together, and where they go: what a group hands to the reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm import Pending
from deepspeed.zero.states.piece import Piece

__all__ = ["Bucket", "Cut", "as_flat", "runs"]


@dataclass(frozen=True)
class Cut:
    """Where the gradient of one piece lies in what this rank receives."""

    piece: Piece
    start: int
    stop: int


@dataclass(eq=False)
class Bucket:
    """The gradients of some parameters on their way to the ranks that own them."""

    names: Sequence[str]
    params: Sequence[nn.Parameter]
    take: Sequence[Callable[[], Tensor | None]]
    """How each parameter's whole gradient is fetched, and forgotten where it was."""
    pack: Callable[[Sequence[Tensor | None]], Tensor]
    """Lays gradients out flat, the slice of rank 0 first; zeros stand for absent ones."""
    splits: Sequence[int]
    """Elements of each rank's slice."""
    cuts: Sequence[Cut]
    group: Any
    accumulate: torch.dtype
    """In what the pieces add up their gradients."""
    pending: Pending[Tensor] | None = field(default=None, init=False)

    @property
    def label(self) -> str:
        """What errors and logs call it."""
        first, last = self.names[0], self.names[-1]
        return f"gradients of {first}" + (f" … {last}" if first != last else "")


def runs(numels: Sequence[int], limit: int) -> list[range]:
    """Consecutive runs of at most `limit` elements, or of one parameter; the last parameters come first."""
    found: list[range] = []
    stop = len(numels)
    while stop > 0:
        start, filled = stop - 1, numels[stop - 1]
        while start > 0 and filled + numels[start - 1] <= limit:
            start -= 1
            filled += numels[start]
        found.append(range(start, stop))
        stop = start
    return found


def as_flat(grad: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A gradient as a dense 1-D tensor of `dtype`; zeros where there is none."""
    if grad is None:
        return torch.zeros(numel, dtype=dtype, device=device)
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    flat = grad.view(-1) if grad.is_contiguous() else grad.reshape(-1)
    return flat if flat.dtype == dtype else flat.to(dtype)
