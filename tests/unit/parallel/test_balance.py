"""Cutting rows of items: equal counts, and weights as equal as can be."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepspeed.errors import UsageError
from deepspeed.parallel.balance import partition_balanced, partition_uniform


def spread(weights, bounds):
    """(heaviest − lightest, heaviest) of the parts."""
    parts = [sum(weights[i:j]) for i, j in pairwise(bounds)]
    return max(parts) - min(parts), max(parts)


@given(st.integers(0, 50), st.integers(1, 12))
def test_uniform_parts_differ_by_one_at_most_and_the_first_are_larger(items, parts):
    bounds = partition_uniform(items, parts)
    sizes = [j - i for i, j in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, items, parts)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_balanced_parts_are_the_best_of_all_cuts(weights, parts):
    bounds = partition_balanced(weights, parts)
    if len(weights) <= parts:
        assert bounds == partition_uniform(len(weights), parts)
        return
    cuts = [[0, *cut, len(weights)] for cut in combinations(range(1, len(weights)), parts - 1)]
    best = min(spread(weights, cut) for cut in cuts)
    assert bounds == max(cut for cut in cuts if spread(weights, cut) == best)


@example([1.00000001, 63.72723784244104, 64.0, 64.29307009413131])
@given(st.lists(st.floats(0, 100), min_size=3, max_size=7))
def test_weights_may_be_measured_times(weights):
    bounds = partition_balanced(weights, 2)
    best = min(spread(weights, [0, cut, len(weights)])[0] for cut in range(1, len(weights)))
    assert spread(weights, bounds)[0] == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    [
        ([1, 2, 3, 4, 5], 2, [0, 3, 5]),
        ([1] * 10, 3, [0, 4, 7, 10]),
        ([5, 1, 1, 1, 5], 3, [0, 1, 4, 5]),
        ([0, 0, 1, 0, 1, 0], 2, [0, 4, 6]),
        ([9, 1, 1, 1, 1, 1], 3, [0, 1, 4, 6]),
        ([1, 1, 1, 9, 1, 1], 3, [0, 3, 4, 6]),
        ([1, 1], 4, [0, 1, 2, 2, 2]),
        ([7], 1, [0, 1]),
    ],
)
def test_cuts_that_published_versions_choose(weights, parts, bounds):
    assert partition_balanced(weights, parts) == bounds


def test_a_deep_model_is_cut_quickly():
    bounds = partition_balanced([50, *[12] * 96, 50], 8)
    assert spread([50, *[12] * 96, 50], bounds)[0] <= 12


@pytest.mark.parametrize("parts", [0, -1])
def test_there_must_be_a_part(parts):
    for cut in (lambda: partition_uniform(3, parts), lambda: partition_balanced([1, 2], parts)):
        with pytest.raises(UsageError, match=f"num_parts {parts}"):
            cut()


def test_weights_are_not_negative():
    with pytest.raises(UsageError, match="found -2"):
        partition_balanced([1, -2, 3], 2)
