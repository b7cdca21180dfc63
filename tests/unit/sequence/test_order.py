"""Which tokens go to which rank, and how that is chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import DeepSpeedConfigError, LayoutError, UsageError
from deepspeed.sequence.build import choose_order
from deepspeed.sequence.inputs import TokenOrder


@given(ulysses=st.integers(1, 4), ring=st.integers(1, 4), times=st.integers(1, 5))
def test_every_token_has_one_rank_and_ranks_have_equal_work(ulysses, ring, times):
    order = TokenOrder(ulysses, ring)
    length = order.multiple * times
    parts = [order.of_rank(length, rank) for rank in range(order.size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    for position in range(ring):
        held = torch.cat(parts[position * ulysses : (position + 1) * ulysses])
        assert torch.equal(held, order.on_ring(length, position))
        # under a causal mask a token looks at all before it: the same sum for every position of the ring
        assert int((held + 1).sum()) * ring == length * (length + 1) // 2


@pytest.mark.parametrize("length", [0, 6, 10])
def test_lengths_that_do_not_fit(length):
    with pytest.raises(UsageError, match=f"a sequence of {length} tokens .* over 4 .* multiple of 4"):
        TokenOrder(4, 1).of_rank(length, 0)
    with pytest.raises(UsageError, match=r"in two pieces each for ring attention.*multiple of 8"):
        TokenOrder(2, 2).check(length)


@pytest.mark.parametrize(
    ("asked", "size", "heads", "expected"),
    [
        ("ulysses", 4, (4, 2), (4, 1)),
        ("ring", 4, (4, 2), (1, 4)),
        ("auto", 4, (8, 4), (4, 1)),
        ("auto", 4, (4, 2), (2, 2)),
        ("auto", 8, (32, 8), (8, 1)),
        ("auto", 4, (3, 3), (1, 4)),
        ("auto", 6, (12, 3), (3, 2)),
    ],
)
def test_the_choice(asked, size, heads, expected):
    order = choose_order(asked, None, size, *heads)
    assert (order.ulysses, order.ring) == expected


def test_a_size_that_is_given():
    assert choose_order("auto", 2, 8, 8, 8) == TokenOrder(2, 4)
    for asked, ulysses in (("auto", 3), ("ulysses", 2), ("ring", 2)):
        with pytest.raises(DeepSpeedConfigError, match=f"ulysses_size is {ulysses}, .* {asked} over 8 ranks"):
            choose_order(asked, ulysses, 8, 8, 8)
    with pytest.raises(LayoutError, match="2 attention heads cannot be shared out over 4"):
        choose_order("ulysses", None, 4, 2, 2)
