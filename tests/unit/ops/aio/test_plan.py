"""How requests are cut: every byte once and in order, whole pages apart from the rest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import UsageError
from deepspeed.ops.aio.plan import ALIGNMENT, Flow

flows = st.builds(
    Flow,
    st.integers(1, 3 * ALIGNMENT),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
BATCHES = st.sampled_from([2**24, 2**25 + ALIGNMENT, 3 * 2**25 + 5])
SIZES = BATCHES | st.integers(0, 40 * ALIGNMENT) | st.integers(0, 40).map(lambda pages: pages * ALIGNMENT)


@given(flow=flows, offset=SIZES, size=SIZES)
def test_parts_cover_a_request_once_and_in_order(flow, offset, size):
    parts = flow.parts(offset, size)
    assert [0, *(part.stop for part in parts)] == [*(part.start for part in parts), size]
    assert all(part.start < part.stop for part in parts)


@given(flow=flows, offset=SIZES, size=SIZES)
def test_direct_parts_are_whole_pages_and_the_rest_is_less_than_a_page(flow, offset, size):
    for part in flow.parts(offset, size):
        if part.direct:
            assert (offset + part.start) % ALIGNMENT == (part.stop - part.start) % ALIGNMENT == 0
            assert part.stop - part.start <= flow.batch
        else:
            assert part.stop - part.start < ALIGNMENT


@given(flow=flows, pages=st.integers(1, 40))
def test_threads_share_a_request(flow, pages):
    assert len(flow.parts(0, pages * ALIGNMENT)) >= min(flow.threads, -(-pages // -(-pages // flow.threads)))


def test_a_batch_is_what_the_queue_holds():
    pairs = itertools.product((False, True), repeat=2)  # single_submit, overlap_events
    got = [(flow.batch, flow.workers) for flow in (Flow(2**20, 32, 2, *pair) for pair in pairs)]
    assert got == [(2**25, 2), (2**25, 4), (2**20, 2), (2**20, 64)]
    assert Flow(2**20, 2, 1).batch == 2**24  # the least
    assert Flow(1000, 3, 1, True).batch == ALIGNMENT  # blocks are whole pages
    assert Flow(2**20, 1024, 64, True).workers == 128


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "threads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True])
def test_numbers_that_are_none_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"{name} is {value!r}"):
        Flow(**{"block_size": 1, "queue_depth": 1, "threads": 1, name: value})
