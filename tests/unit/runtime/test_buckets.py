"""Bucket planning: every gradient in exactly one bucket, within the limit, the same on every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.runtime.reduction.buckets import ALONE_BYTES, FIRST_BYTES, plan

sizes = st.lists(st.integers(0, 3 * ALONE_BYTES), max_size=40)


@given(sizes, st.data(), st.integers(1, 64 << 20))
def test_buckets_hold_everything_once_and_keep_the_limit(sizes, data, limit):
    kinds = data.draw(st.lists(st.sampled_from("ab"), min_size=len(sizes), max_size=len(sizes)))
    buckets = plan(sizes, kinds, limit)
    members = [position for bucket in buckets for position in bucket.members]
    assert sorted(members) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket.members
        assert len({kinds[position] for position in bucket.members}) == 1
        assert len(bucket.members) == 1 or sum(sizes[position] for position in bucket.members) <= limit
        assert all(sizes[position] >= ALONE_BYTES for position in bucket.alone)


def test_the_last_parameters_travel_first_in_a_small_bucket():
    buckets = plan([FIRST_BYTES] * 4, ["fp32"] * 4)
    assert buckets[0].members == (3,)
