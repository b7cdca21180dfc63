"""Samples of a product in which few choices still meet: every two, or every three, values of different factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

# The field of four elements: sums are those of the bits, products these.
_TIMES = ((0, 0, 0, 0), (0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))
_POINTS = (0, 1, 2, 3)
_MOST = len(_POINTS) + 1


def pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """At most 16 rows: every value of a factor stands in one with every value of any other factor."""
    return _sample(2, factors)


def triples(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """At most 64 rows: any three values of three factors stand in one together."""
    return _sample(3, factors)


def _sample(strength: int, factors: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Values of all polynomials of so many coefficients: any that many points, the leading one included, are free."""
    assert len(factors) <= _MOST, f"{len(factors)} factors; this way there are at most {_MOST}"
    assert all(1 <= len(factor) <= len(_POINTS) for factor in factors), "a factor has one to four values"
    rows = []
    for coefficients in product(_POINTS, repeat=strength):
        row = [*(_value(coefficients, point) for point in _POINTS), coefficients[0]]
        rows.append(tuple(factor[at % len(factor)] for factor, at in zip(factors, row, strict=False)))
    return _needed(list(dict.fromkeys(rows)), min(strength, len(factors)))


def _needed(rows: list[tuple[Any, ...]], strength: int) -> list[tuple[Any, ...]]:
    """Without those of which everything that meets also meets in another: the last ones go first."""
    meetings = {row: [*combinations(enumerate(row), strength)] for row in rows}
    left = Counter(each for row in rows for each in meetings[row])
    for row in reversed(rows):
        if all(left[each] > 1 for each in meetings[row]):
            left.subtract(meetings.pop(row))
    return list(meetings)


def _value(coefficients: Sequence[int], point: int) -> int:
    total = 0
    for each in coefficients:  # the leading one first
        total = _TIMES[total][point] ^ each
    return total
