"""Reductions of which each rank receives its own slice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.owners import reduce_to_owners
from deepspeed.errors import CommError
from tests.harness import ranks


@pytest.mark.parametrize("options", [{}, {"everywhere": True}, {"merged": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@ranks(1, 2, 3)
def test_every_rank_receives_the_sum_of_its_slice(dtype, options):
    rank, world = dist.get_rank(), dist.get_world_size()
    for splits in ([4] * world, [0] + [3] * (world - 1), [5] + [0] * (world - 1), list(range(world))):
        count = sum(splits)
        mine = (torch.arange(count) + 10 * rank).to(dtype)
        expected = sum(torch.arange(count) + 10 * other for other in range(world)).to(dtype).split(splits)[rank]
        assert torch.equal(reduce_to_owners(mine, splits, **options).wait(), expected), splits


@pytest.mark.parametrize("merged", [True, False])
@ranks(2, 3)
def test_where_a_backend_cannot_exchange(merged, monkeypatch):
    """As on devices: uneven slices go by one all-reduce, or by a reduction for each owner."""
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    for splits in (list(range(1, world + 1)), [0] * (world - 1) + [4]):
        mine = torch.full((sum(splits),), float(rank + 1))
        found = reduce_to_owners(mine, splits, merged=merged).wait()
        assert torch.equal(found, torch.full((splits[rank],), world * (world + 1) / 2))


@ranks(2)
def test_splits_that_do_not_fit_are_told():
    with pytest.raises(CommError, match="2 splits of 5 elements for 2 ranks and a tensor of 4"):
        reduce_to_owners(torch.ones(4), [2, 3])
