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


def kinds(rank):
    """Tensors of a model and stranger ones; different on every rank, equal in shape and dtype."""
    normal = torch.randn(64, generator=torch.Generator().manual_seed(rank))
    store = torch.arange(12.0) + 100 * rank
    return [
        torch.nn.Parameter(normal.view(8, 8)),
        torch.nn.Parameter(normal[:6].view(2, 3).to(torch.bfloat16)),
        torch.tensor(rank, dtype=torch.int64),
        torch.tensor([rank == 0, True]),
        torch.tensor([rank], dtype=torch.int16),  # gloo has no such dtype
        normal[:4].to(torch.complex64),
        torch.empty(0),
        torch.empty(3, 0, dtype=torch.int64),
        normal.view(8, 8).clone().t(),
        store[2:5],
        store.view(3, 4)[:, 1:3],  # with gaps, beside the one before
        (torch.arange(3.0) + rank).expand(4, 3),
        torch.tensor(float(rank)),
    ]


def watched():
    """(where it lies, bytes) of every broadcast that is really sent from now on."""
    sent = []
    single = coalesced._broadcast_single

    def watch(tensor, src, group):
        sent.append((tensor.data_ptr(), tensor.numel()))
        return single(tensor, src, group)

    coalesced._broadcast_single = watch
    return sent


@ranks(2, 3)
@pytest.mark.parametrize("limit", [1, 40, 64 << 20])
def test_broadcast_of_everything(limit):
    sent = watched()
    rank, src = td.get_rank(), td.get_world_size() - 1
    mine, want = kinds(rank), [tensor.detach().clone() for tensor in kinds(src)]
    places = [tensor.data_ptr() for tensor in mine]
    assert dist.broadcast_coalesced(mine, src, limit_bytes=limit) is None
    for got, expected in zip(mine, want, strict=True):
        assert torch.equal(got, expected)
    assert [tensor.data_ptr() for tensor in mine] == places
    sizes = [size for _, size in sent]
    filled, dtypes = 11, 6
    assert len(sizes) == {1: filled, 40: filled - 1, 64 << 20: dtypes}[limit]
    everyone = [None] * td.get_world_size()
    td.all_gather_object(everyone, sizes)
    assert everyone == [sizes] * len(everyone)
    (record,) = dist.recent_operations()
    assert (record.op, record.tensors, record.peer) == ("broadcast_coalesced", len(mine), src)


@ranks(2)
def test_what_lies_around_views_stays():
    sent, rank = watched(), td.get_rank()
    store = torch.arange(12.0) + 100 * rank
    dist.broadcast_coalesced([store[2:5], store.view(3, 4)[2, 1:3]], 0)
    touched = {2, 3, 4, 9, 10}
    assert store.tolist() == [at + (0.0 if at in touched else 100.0 * rank) for at in range(12)]
    assert [size for _, size in sent] == [20]


@ranks(2, 3)
def test_broadcast_packs_are_bounded():
    """Small ones share, a large one travels by itself, wherever it lies."""
    sent, rank = watched(), td.get_rank()
    sizes = [10, 20, 5, 200, 30, 1, 70]
    mine = [torch.full((size,), float(rank)) for size in sizes]
    mine[3] = torch.full((20, 10), float(rank)).t() if rank else torch.zeros(10, 20)
    dist.broadcast_coalesced(mine, 0, limit_bytes=4 * 35)
    assert [size for _, size in sent] == [4 * 35, 4 * 200, 4 * 31, 4 * 70]
    assert all(not tensor.any() for tensor in mine)


@ranks(2)
def test_a_large_tensor_is_not_copied():
    sent = watched()
    large, small = torch.full((50, 2), float(td.get_rank())), [torch.zeros(1), torch.zeros(2)]
    dist.broadcast_coalesced([*small, large], 1, limit_bytes=64)
    assert [size for _, size in sent] == [12, 400]
    assert sent[1][0] == large.data_ptr()
    assert large.eq(1).all()


@ranks(3)
def test_broadcast_within_a_subgroup_and_of_nothing():
    sent = watched()
    group = dist.new_group([1, 2])
    values = [torch.full((2,), td.get_rank()) for _ in range(3)]
    for each in (values, [], [torch.empty(0)]):
        dist.broadcast_coalesced(each, 2, group)
    assert [value.tolist() for value in values] == [[2, 2] if td.get_rank() else [0, 0]] * 3
    assert len(sent) == (td.get_rank() > 0)
