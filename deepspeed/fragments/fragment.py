"""`Fragment`: the part of one logical tensor that this rank holds. Checkpoints and state access speak it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Fragment", "intersection"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one logical tensor that this rank holds.

    `kind` is "param" (what the model computes with), "master" (what the optimizer updates), "grad", or the name of an
    optimizer state such as "exp_avg".
    """

    name: str
    kind: str
    shape: torch.Size
    """Of the whole logical tensor, before any parallelism."""
    interval: tuple[int, int]
    """The flat [start, stop) of the slice that is held here."""
    data: Tensor
    """One-dimensional, stop - start elements."""
    origin: tuple[int, ...] | None = None
    """Where this rank's tensor-parallel slice begins; None if the tensor is not sliced."""
    extent: torch.Size | None = None
    """The size of that slice; None if the tensor is not sliced."""


def intersection(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """What two intervals share; empty (start == stop) where they do not meet."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (start, start)
