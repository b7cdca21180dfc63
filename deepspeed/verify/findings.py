"""`Finding`: one value that is not what it must be, and how elements of tensors are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A value that differs from what it must be."""

    rank: int
    tensor: str
    found: object
    expected: object
    source: str
    """What computes the expected value."""
    element: tuple[int, ...] | None = None
    """Where it lies in the tensor; None for what is no tensor, or where the place is not known."""
    count: int = 1
    """Elements that differ."""

    def __str__(self) -> str:
        place = "" if self.element is None else f"[{', '.join(map(str, self.element))}]"
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        expected = f"expected {self.expected} by {self.source}"
        return f"rank {self.rank}: {self.tensor}{place} is {self.found}, {expected}{more}"


def bits(tensor: Tensor) -> Tensor:
    """The elements of a tensor as integers, flat; those of a tensor with gaps are copied."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(WORDS[flat.element_size()]) if flat.numel() else flat.to(torch.int64)


def place_of(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element of a tensor of that shape, from its index in the flat tensor."""
    return tuple(int(each) for each in torch.unravel_index(torch.tensor(index), shape)) if shape else (0,)


def first_of(
    wrong: Tensor, found: Tensor, expected: Tensor, *, rank: int, tensor: str, source: str, shape: tuple[int, ...]
) -> Finding | None:
    """The finding for the first element that is marked in `wrong`; None if none is."""
    count = int(wrong.sum())
    if not count:
        return None
    index = int(wrong.reshape(-1).to(torch.uint8).argmax())
    values = found.reshape(-1)[index].item(), expected.reshape(-1)[index].item()
    return Finding(rank, tensor, values[0], values[1], source, place_of(index, shape), count)
