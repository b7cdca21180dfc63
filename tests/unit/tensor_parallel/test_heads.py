"""Heads over ranks: all are computed once, and each rank has the keys and values that its queries look at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.tensor_parallel.attention import Heads


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8))
def test_every_rank_has_the_keys_of_its_queries(key_value, group, ranks):
    heads = Heads(key_value * group, key_value, 4)
    if heads.query < ranks:
        return
    queries, keys = heads.queries_of(ranks), heads.keys_of(ranks)
    assert len(queries) == len(keys) == ranks
    if heads.shares_keys(ranks) and min(len(range(*part)) for part in queries) == 0:
        return  # fewer query heads in a group than ranks for it: refused where a model is planned
    assert [head for part in queries for head in range(*part)] == list(range(heads.query))
    for query, key in zip(queries, keys, strict=True):
        assert {head // group for head in range(*query)} == set(range(*key))
        assert len(range(*query)) % len(range(*key)) == 0


def test_uneven_groups_go_whole_to_a_rank():
    assert Heads(6, 3, 8).queries_of(2) == [(0, 4), (4, 6)]
    assert Heads(6, 3, 8).keys_of(2) == [(0, 2), (2, 3)]


def test_ranks_share_a_key_where_there_are_too_few():
    heads = Heads(8, 2, 8)
    assert heads.shares_keys(4)
    assert heads.queries_of(4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert heads.keys_of(4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert heads.elements((1, 2)) == (8, 16)
    assert heads.fewest(4) == (2, 1)
    assert Heads(5, 5, 8).fewest(2) == (2, 2)
