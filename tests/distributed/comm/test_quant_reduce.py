"""Means of tensors as int4 codes in two hops: shards of all ranks, the bound of the codes, what feedback adds up."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.comm.coalesced_collectives import (
    all_to_all_loco_quant_reduce,
    all_to_all_quant_reduce,
    reduce_scatter_coalesced,
)

from deepspeed import comm
from deepspeed.errors import UsageError
from tests.harness import ranks


def node_groups():
    """Two nodes with two ranks each."""
    made = {f"local_{node}": comm.new_group([2 * node, 2 * node + 1]) for node in range(2)}
    return made | {f"global_{place}": comm.new_group([place, place + 2]) for place in range(2)}


@ranks(4)
def test_shards_of_the_mean():
    groups, rank = node_groups(), comm.get_rank()
    made = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(shape, generator=made) for shape in ((33, 7), (4096,), (3,))] + [torch.ones(5).bfloat16()]
    sent = []
    with comm.dispatcher.events.subscribe(comm.CollectiveFinished, sent.append):
        found = all_to_all_quant_reduce(tensors, groups)
    assert [(event.op, event.codec) for event in sent] == [("all_to_all_single", "int4")] * 2
    assert sum(event.bytes for event in sent) < 0.6 * 1.5 * 4500  # half a byte each, then half of that
    exact = reduce_scatter_coalesced(tensors)
    for mine, wanted in zip(found, exact, strict=True):
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape)
        torch.testing.assert_close(mine, wanted, rtol=0, atol=2 * 4 / 14)
    params = [torch.nn.Parameter(torch.zeros(600))]
    total, plain = 0.0, torch.randn(600, generator=made)
    for _ in range(20):
        params[0].grad = plain.clone()
        total = total + all_to_all_loco_quant_reduce(params, groups, {"err_beta": 0.0, "reset_T": 1024})[0]
    mean = reduce_scatter_coalesced([plain])[0]
    torch.testing.assert_close(total / 20, mean, rtol=0, atol=0.05)
    assert all_to_all_quant_reduce([], groups) == []
    with pytest.raises(UsageError, match=r"none of the names that begin with 'local_' is a group with rank"):
        all_to_all_quant_reduce(tensors, {"global_0": groups["global_0"]})
    with pytest.raises(UsageError, match=r"expected err_beta from 0 to below 1"):
        all_to_all_loco_quant_reduce(params, groups, {"err_beta": 1.0, "reset_T": 5})
    params[0].grad = None
    with pytest.raises(UsageError, match=r"params \[0\] have no gradient"):
        all_to_all_loco_quant_reduce(params, groups, {"err_beta": 0.5, "reset_T": 5})
