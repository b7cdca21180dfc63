"""Samples in which all choices meet: counted."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.covering import pairs, triples

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@pytest.mark.parametrize(("sample", "strength", "most"), [(pairs, 2, 16), (triples, 3, 64)])
@given(sizes=SIZES)
def test_every_choice_meets_every_other(sample, strength, most, sizes):
    factors = [range(size) for size in sizes]
    rows = sample(*factors)
    assert len(rows) == len(set(rows)) <= most
    assert set(rows) <= set(product(*factors))
    for places in combinations(range(len(sizes)), min(strength, len(sizes))):
        met = {tuple(row[place] for place in places) for row in rows}
        assert met == set(product(*(factors[place] for place in places)))


def test_what_there_is_no_sample_for():
    with pytest.raises(AssertionError, match="6 factors"):
        pairs(*[[0]] * 6)
    with pytest.raises(AssertionError, match="one to four"):
        triples([0], range(5))
