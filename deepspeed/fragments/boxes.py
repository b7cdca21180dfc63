"""A flat interval of a tensor as few N-dimensional boxes, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = ["Box", "boxes"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cover the row-major interval [start, stop) of `shape`, in order, with at most 2·ndim - 1 boxes."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows are [first, last)
    if first > last:
        yield from _inside(shape, start // inner, start % inner, stop - start // inner * inner)
        return
    if start < first * inner:
        yield from _inside(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _inside(shape, last, 0, stop - last * inner)


def _inside(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)
