"""Many tensors, one collective: values, mixed dtypes, uneven sizes, async, both ways of batching."""

import math
import warnings

import pytest
import torch
import torch.distributed as td

from deepspeed import comm as dist
from deepspeed.comm import coalesced
from deepspeed.errors import CommError
from tests.harness import ranks

NATIVE = pytest.mark.parametrize("native", [False, True])
ASYNC = pytest.mark.parametrize("async_op", [False, True])


def choose(native):
    """gloo can also batch by itself, which tests the path that is meant for NCCL."""
    warnings.simplefilter("error")
    coalesced._batches_itself = lambda group: native


def tensors(rank):
    return [
        torch.arange(3.0) + rank,
        torch.full((2, 2), 1 + rank, dtype=torch.float64),
        torch.tensor(2.0 * rank),
        torch.ones(3, 2).t() * rank,  # not contiguous
    ]


@ranks(2, 3)
@NATIVE
@ASYNC
def test_all_reduce(native, async_op):
    choose(native)
    world = td.get_world_size()
    mine = tensors(td.get_rank())[: 3 if native else 4]
    expected = [torch.stack(same).sum(0) for same in zip(*(tensors(rank) for rank in range(world)), strict=True)]
    work = dist.all_reduce_coalesced(mine, async_op=async_op)
    if async_op:
        assert work.wait() is True
    for got, want in zip(mine, expected, strict=False):
        assert torch.equal(got, want)
    record = dist.recent_operations()[-1]
    assert (record.op, record.tensors) == ("all_reduce_coalesced", len(mine))


@ranks(2)
def test_all_reduce_with_another_operation_on_a_subgroup():
    choose(False)
    group = dist.new_group([0, 1])
    one, two = torch.tensor([1.0 + td.get_rank()]), torch.tensor([5.0 - td.get_rank()])
    dist.all_reduce_coalesced([one, two], dist.ReduceOp.MAX, group)
    assert (one.item(), two.item()) == (2, 5)
    single = torch.ones(3)
    dist.all_reduce_coalesced([single], group=group)
    assert single.tolist() == [2, 2, 2]


@ranks(2, 3)
@NATIVE
@ASYNC
def test_all_gather(native, async_op):
    choose(native)
    world, rank = td.get_world_size(), td.get_rank()
    inputs = [tensor.contiguous() for tensor in tensors(rank)]
    outputs = [tensor.new_zeros(world * tensor.numel()) for tensor in inputs]
    work = dist.all_gather_coalesced(outputs, inputs, async_op=async_op)
    if async_op:
        work.wait()
    for index, got in enumerate(outputs):
        want = torch.cat([tensors(r)[index].reshape(-1) for r in range(world)])
        assert torch.equal(got, want)


@ranks(2)
def test_all_gather_refuses_what_does_not_fit():
    with pytest.raises(CommError, match="1 outputs for 2 inputs"):
        dist.all_gather_coalesced([torch.ones(2)], [torch.ones(1)] * 2)
    with pytest.raises(CommError, match=r"output 0 .* 2 elements"):
        dist.all_gather_coalesced([torch.ones(3)], [torch.ones(1)])


@ranks(2, 3)
@ASYNC
def test_reduce_scatter_gives_mean_shards(async_op):
    warnings.simplefilter("error")
    world, rank = td.get_world_size(), td.get_rank()
    sizes = [0, 1, 2, 3, 6, 7, 12]
    inputs = [torch.arange(float(n)) * (r + 1) for r in [rank] for n in sizes]
    inputs.append(torch.full((2, 3), float(rank), dtype=torch.float64))
    before = [tensor.clone() for tensor in inputs]
    shards = dist.reduce_scatter_coalesced(inputs, async_op=async_op)
    if async_op:
        shards = shards.wait()
    factors = [sum(range(1, world + 1)) / world] * len(sizes)
    wholes = [torch.arange(float(n)) * factor for n, factor in zip(sizes, factors, strict=True)]
    wholes.append(torch.full((6,), (world - 1) / 2, dtype=torch.float64))
    for shard, whole in zip(shards, wholes, strict=True):
        chunk = math.ceil(whole.numel() / world)
        torch.testing.assert_close(shard, whole[rank * chunk : (rank + 1) * chunk])
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@ranks(2)
def test_reduce_scatter_sums_and_subgroups():
    group = dist.new_group([0, 1])
    (shard,) = dist.reduce_scatter_coalesced([torch.ones(4)], group, op=dist.ReduceOp.SUM)
    assert shard.tolist() == [2, 2]
    (shard,) = dist.reduce_scatter_coalesced([torch.full((6,), float(td.get_rank()))], dist.get_world_group())
    assert shard.tolist() == [0.5] * 3
