"""Intervals of a dim over ranks: they cover it once, and what is cut comes together again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.fragments import DimSplit, even, even_runs


@given(st.integers(0, 50), st.integers(1, 9))
def test_dealt_items_are_neighbours_and_nearly_equal(count, hands):
    parts = even_runs(count, hands)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == count
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4))
def test_even_cuts_lie_at_units(total, ranks, unit):
    parts = even(total, ranks, unit)
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(stop % unit == 0 for _, stop in parts[:-1])


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 2), st.sampled_from([1, 2])
)
def test_what_is_cut_comes_together(sizes, ranks, dim, unit):
    cuts, offset = [], 0
    for size in sizes:
        cuts.append([(start + offset, stop + offset) for start, stop in even(size * unit, ranks, unit)])
        offset += size * unit
    split = DimSplit.of(dim, cuts)
    shape = [3, 3, 3]
    shape[dim] = offset
    whole = torch.arange(3 * 3 * offset).view(shape)
    parts = [split.cut(whole, rank) for rank in range(ranks)]
    assert [tuple(part.shape) for part in parts] == [split.shape(shape, rank) for rank in range(ranks)]
    assert split.total == offset
    assert all(split.whole_shape(part.shape) == tuple(shape) for part in parts)
    assert torch.equal(split.join(parts), whole)


@given(st.integers(1, 5), st.integers(1, 8))
def test_ranks_may_hold_copies(pieces, ranks):
    """Of a whole of several pieces, each on one or more neighbouring ranks."""
    if ranks < pieces:
        return
    owners = [piece for piece, (first, last) in enumerate(even_runs(ranks, pieces)) for _ in range(first, last)]
    split = DimSplit.of(0, [[(2 * piece, 2 * piece + 2) for piece in owners]])
    assert split.total == 2 * pieces
    assert split.shared == (ranks > pieces)
    whole = torch.arange(2 * pieces)
    assert torch.equal(split.join([split.cut(whole, rank) for rank in range(ranks)]), whole)
    firsts = [rank for rank in range(ranks) if split.first_holder(rank) == rank]
    assert [owners[rank] for rank in firsts] == list(range(pieces)), "each piece is counted once"
