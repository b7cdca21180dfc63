"""Assignments that tensor-parallel ranks have alike: dealt to them, computed, and whole again, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.ep_tp_dispatch import (
    RoutedAssignmentPayload,
    assert_tp_payload_consistent,
    average_gradient_over_tp,
    dispatch_counters,
    partition_assignments,
    restore_combined,
)

from deepspeed.errors import CommError, UsageError
from tests.harness import ranks


def payload(weights, splits, tokens=4):
    count = sum(splits)
    places = torch.arange(count)
    none = torch.zeros(count, dtype=torch.bool)
    return RoutedAssignmentPayload(
        places % tokens, places // 2, places, places, weights, none, none, list(splits), list(splits)
    )


@ranks(2)
def test_parts_of_ranks_sum_to_the_whole():
    group, rank = dist.group.WORLD, dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(shape, generator=generator, requires_grad=True) for shape in ((4, 3), (7,)))
    matrix = torch.randn(3, 3, generator=generator, requires_grad=True)
    whole = payload(weights, (5, 2))
    assert_tp_payload_consistent(whole, tp_group=group, tp_size=2)

    def combine(part, tokens, factors):
        rows = (tokens[part.token_indices] @ matrix).tanh() * factors[part.assignment_indices].unsqueeze(1)
        return torch.zeros(4, 3).index_add(0, part.token_indices, rows)

    expected = combine(whole, x, weights)
    slopes = torch.autograd.grad(expected.square().sum(), (x, weights, matrix))
    part, context = partition_assignments(whole, tp_group=group, tp_rank=rank, tp_size=2)
    assert part.input_splits == part.output_splits == [[3, 1], [2, 1]][rank]
    assert context.local_indices.tolist() == [[0, 1, 2, 5], [3, 4, 6]][rank]
    assert dispatch_counters(context) == {"assignments": 7, "local_assignments": 4 - rank, "tp_size": 2}
    tokens, factors = (average_gradient_over_tp(each, group, 2) for each in (x, weights))
    found = restore_combined(combine(part, tokens, factors), context, tp_group=group, validate_coverage=True)
    torch.testing.assert_close(found, expected)
    mine = torch.autograd.grad(found.square().sum(), (x, weights, matrix))
    dist.all_reduce(mine[2])  # a parameter of experts: the mean over these ranks
    torch.testing.assert_close((mine[0], mine[1], mine[2] / 2), slopes)

    other = payload(weights.detach() + rank, (5, 2))
    with pytest.raises(CommError, match="rank 1 has other assignments than rank 0: combine_weights differ"):
        assert_tp_payload_consistent(other, tp_group=group, tp_size=2)
    _, twice = partition_assignments(whole, tp_group=group, tp_rank=0, tp_size=2)
    with pytest.raises(CommError, match="7 of 7 assignments are not computed once: number 0 by 2 ranks"):
        restore_combined(found, twice, tp_group=group, validate_coverage=True)
    with pytest.raises(UsageError, match=r"input_splits \[5, 1\] sum to 6, but there are 7 assignments"):
        whole.input_splits = [5, 1]
        partition_assignments(whole, tp_group=group, tp_rank=rank, tp_size=2)


def test_one_rank_has_everything():
    whole = payload(torch.rand(4), (4,))
    part, context = partition_assignments(whole, tp_group=None, tp_rank=0, tp_size=1)
    assert torch.equal(part.combine_weights, whole.combine_weights)
    assert (context.num_tokens, context.tp_size) == (4, 1)
    given = torch.rand(4, 2)
    assert restore_combined(given, context, tp_group=None) is given
    assert average_gradient_over_tp(given, None, 1) is given
    assert_tp_payload_consistent(whole, tp_group=None, tp_size=1)
