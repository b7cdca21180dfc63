"""Neighbours that go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["runs"]

T = TypeVar("T")


def runs(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Items in their order, in runs of at most `limit` elements, or of one item that is larger; 0 is no limit."""
    run: list[T] = []
    filled = 0
    for item in items:
        if run and limit and filled + size(item) > limit:
            yield run
            run, filled = [], 0
        run.append(item)
        filled += size(item)
    if run:
        yield run
