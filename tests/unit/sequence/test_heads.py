"""Which heads go to which rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import LayoutError
from deepspeed.sequence.exchange import head_plan, shares


@given(keys=st.integers(1, 12), group=st.integers(1, 8), size=st.integers(1, 16))
def test_every_query_head_is_computed_once_beside_its_key_head(keys, group, size):
    queries = keys * group
    if queries < size:
        with pytest.raises(LayoutError, match=f"{queries} attention heads .* over {size} "):
            head_plan(queries, keys, size)
        return
    plan = head_plan(queries, keys, size)
    assert head_plan(queries, keys, size) is plan, "layers that run outside of graphs compute it once"
    assert sum(plan.queries) == queries
    assert max(plan.queries) - min(plan.queries) <= (group if keys >= size else 1)
    head = 0
    for rank in range(size):
        shared = plan.group(rank)
        assert shared * len(plan.keys[rank]) == plan.queries[rank]
        for local in range(plan.queries[rank]):
            assert plan.keys[rank][local // shared] == head // group
            head += 1
    if keys % size == 0:
        assert not plan.repeats, "nothing is sent twice where heads go evenly"


@given(total=st.integers(0, 50), size=st.integers(1, 9))
def test_shares_are_even(total, size):
    found = shares(total, size)
    assert sum(found) == total
    assert max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True)


def test_heads_that_do_not_share_evenly():
    with pytest.raises(LayoutError, match="6 query heads cannot share 4 key/value heads"):
        head_plan(6, 4, 2)
