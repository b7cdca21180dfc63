"""Cutting a row of items into consecutive parts: of equal count, or of weights as equal as can be. Pure arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from deepspeed.errors import UsageError

Number = float  # weights are counts of parameters or measured times


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The bounds of parts of equal count, num_parts + 1 numbers; the first parts get one more where it does not fit."""
    _check(num_parts)
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[Number], num_parts: int) -> list[int]:
    """The bounds of parts, none of them empty, whose heaviest and lightest differ least.

    Of several such cuts the one with the lighter heaviest part, then with the later cuts. With no more items than
    parts there is nothing to choose: as `partition_uniform`.
    """
    _check(num_parts)
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"partition_balanced: a weight is a number of at least 0; found {weight}")
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return _Row(weights, num_parts).best()


def _check(num_parts: int) -> None:
    if num_parts < 1:
        raise UsageError(f"there must be at least one part; found num_parts {num_parts}")


class _Row:
    """One question. `sums[j] - sums[i]` is the weight of items i to j - 1, exactly: sums of floats would not be."""

    def __init__(self, weights: Sequence[Number], parts: int) -> None:
        self.count, self.parts = len(weights), parts
        exact = [Fraction(weight if isinstance(weight, int) else float(weight)) for weight in weights]
        unit = math.lcm(*(weight.denominator for weight in exact))
        self.sums: list[int] = [0, *accumulate(int(weight * unit) for weight in exact)]

    def best(self) -> list[int]:
        """Try every weight that a lightest part can have, heaviest first, as long as one could still be better.

        No cut's heaviest part is below `least`, the optimum without a bound on the lightest; so a lightest part below
        `least - difference` cannot improve on a difference that was reached already.
        """
        least = self._lightest_heaviest(0)
        assert least is not None, "without a lower bound every cut into parts that are not empty is allowed"
        found: tuple[int, int, int] | None = None  # difference, heaviest, lightest
        for low in sorted(self._possible_lightest(), reverse=True):
            if found is not None and low < least - found[0]:
                break
            heaviest = self._lightest_heaviest(low)
            if heaviest is not None and (found is None or (heaviest - low, heaviest) < found[:2]):
                found = (heaviest - low, heaviest, low)
        assert found is not None, "a lightest part of every possible weight was tried"
        return self._cuts(low=found[2], high=found[1])

    def _possible_lightest(self) -> set[int]:
        return {
            self.sums[j] - self.sums[i]
            for i in range(self.count)
            for j in range(i + 1, self.count + 1)
            if (self.sums[j] - self.sums[i]) * self.parts <= self.sums[-1]
        }

    def _lightest_heaviest(self, low: int) -> int | None:
        """The least weight of the heaviest part if every part weighs at least `low`; None if there is no such cut."""
        infinite = self.sums[-1] + 1
        reached = [0, *([infinite] * self.count)]
        for _ in range(self.parts):
            after = [infinite] * (self.count + 1)
            for end in range(1, self.count + 1):
                last = min(end, bisect_right(self.sums, self.sums[end] - low))
                for start in range(last - 1, -1, -1):
                    weight = self.sums[end] - self.sums[start]
                    if weight >= after[end]:
                        break  # starting earlier only makes this part heavier
                    after[end] = min(after[end], max(weight, reached[start]))
            reached = after
        return reached[-1] if reached[-1] < infinite else None

    def _cuts(self, *, low: int, high: int) -> list[int]:
        """The latest cuts for which every part weighs between `low` and `high`."""
        possible = [{self.count}]  # with 0, 1, … parts left: where they may begin
        for _ in range(self.parts):
            ends = possible[-1]
            possible.append({start for start in range(self.count) if self._next(start, ends, low, high) is not None})
        bounds = [0]
        for ends in reversed(possible[:-1]):
            bound = self._next(bounds[-1], ends, low, high)
            assert bound is not None, "a cut within these weights was found before"
            bounds.append(bound)
        return bounds

    def _next(self, start: int, ends: set[int], low: int, high: int) -> int | None:
        first = max(start + 1, bisect_left(self.sums, self.sums[start] + low))
        last = bisect_right(self.sums, self.sums[start] + high) - 1
        return next((end for end in range(last, first - 1, -1) if end in ends), None)
