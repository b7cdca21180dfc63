"""Every collective against expected values: sync and async, the world and a subgroup, without a warning."""

import functools
import os
import warnings

import pytest
import torch
import torch.distributed as td

from deepspeed import comm as dist
from deepspeed.comm import ReduceOp
from tests.harness import ranks

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
WHERE = pytest.mark.parametrize("where", ["world", "subgroup"])


def values(*numbers):
    return torch.tensor([float(number) for number in numbers])


class Setting:
    """The group of a test: the world, or (of three ranks) ranks 0 and 2."""

    def __init__(self, where):
        warnings.simplefilter("error")
        self.members = list(range(td.get_world_size())) if where == "world" else [0, td.get_world_size() - 1]
        self.group = None if where == "world" else dist.new_group(self.members)
        self.inside = td.get_rank() in self.members
        self.rank = self.members.index(td.get_rank()) if self.inside else -1
        self.size = len(self.members)
        self.total = self.size * (self.size + 1) // 2  # the sum of 1 + rank over the group


def call(mode, function, *args, **kwargs):
    handle = function(*args, **kwargs, async_op=mode == "async")
    if mode == "async":
        assert handle.wait()
        assert handle.is_completed()
    else:
        assert handle is None


def on_groups(test):
    """Run on two ranks, and on three with a subgroup of two of them (whose outsiders do nothing)."""

    @functools.wraps(test)
    def body(mode, where):
        setting = Setting(where)
        if setting.inside:
            test(mode, setting)

    return MODES(WHERE(ranks(2, 3)(_named(body, test))))


def _named(body, test):
    del body.__wrapped__  # the harness and pytest must see the wrapper's own parameters
    body.__qualname__ = test.__qualname__
    return body


@on_groups
def test_all_reduce(mode, s):
    for function in (dist.all_reduce, dist.inference_all_reduce):
        x = values(s.rank + 1, 2)
        call(mode, function, x, group=s.group)
        assert x.tolist() == [s.total, 2 * s.size]
        x = values(s.rank)
        call(mode, function, x, ReduceOp.MAX, s.group)
        assert x.tolist() == [s.size - 1]


@on_groups
def test_broadcast(mode, s):
    x = values(s.rank)
    call(mode, dist.broadcast, x, s.members[1], s.group)
    assert x.tolist() == [1]


@on_groups
def test_reduce(mode, s):
    x = values(s.rank + 1)
    call(mode, dist.reduce, x, s.members[1], group=s.group)
    if s.rank == 1:
        assert x.tolist() == [s.total]


@on_groups
def test_all_gather(mode, s):
    out = [torch.zeros(2) for _ in range(s.size)]
    call(mode, dist.all_gather, out, values(s.rank, 7), s.group)
    assert torch.stack(out).tolist() == [[rank, 7] for rank in range(s.size)]


@on_groups
def test_all_gather_into_tensor(mode, s):
    for function in (dist.all_gather_into_tensor, dist.allgather_fn):
        out = torch.zeros(2 * s.size)
        call(mode, function, out, values(s.rank, 7), s.group)
        assert out.view(-1, 2).tolist() == [[rank, 7] for rank in range(s.size)]


@on_groups
def test_reduce_scatter(mode, s):
    out = torch.zeros(1)
    call(mode, dist.reduce_scatter, out, [values((s.rank + 1) * 10**i) for i in range(s.size)], group=s.group)
    assert out.tolist() == [s.total * 10**s.rank]


@on_groups
def test_reduce_scatter_tensor(mode, s):
    for function in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn):
        out = torch.zeros(1)
        call(mode, function, out, values(*((s.rank + 1) * 10**i for i in range(s.size))), group=s.group)
        assert out.tolist() == [s.total * 10**s.rank]


@on_groups
def test_all_to_all(mode, s):
    out = [torch.zeros(1) for _ in range(s.size)]
    call(mode, dist.all_to_all, out, [values(10 * s.rank + to) for to in range(s.size)], s.group)
    assert torch.cat(out).tolist() == [10 * rank + s.rank for rank in range(s.size)]


@on_groups
def test_all_to_all_single(mode, s):
    out = torch.zeros(s.size)
    call(mode, dist.all_to_all_single, out, values(*(10 * s.rank + to for to in range(s.size))), group=s.group)
    assert out.tolist() == [10 * rank + s.rank for rank in range(s.size)]


@on_groups
def test_all_to_all_single_uneven(mode, s):
    """Everybody sends one element to all but the last rank of the group, which gets two."""
    sent = [1] * (s.size - 1) + [2]
    got = [sent[s.rank]] * s.size
    out = torch.zeros(sum(got))
    call(mode, dist.all_to_all_single, out, torch.full((sum(sent),), float(s.rank)), got, sent, s.group)
    assert out.tolist() == [float(rank) for rank in range(s.size) for _ in range(sent[s.rank])]


@on_groups
def test_gather(mode, s):
    root = s.members[1]
    out = [torch.zeros(1) for _ in range(s.size)] if td.get_rank() == root else None
    call(mode, dist.gather, values(s.rank), out, root, s.group)
    if out is not None:
        assert torch.cat(out).tolist() == list(range(s.size))


@on_groups
def test_scatter(mode, s):
    root = s.members[1]
    parts = [values(5 + rank) for rank in range(s.size)] if td.get_rank() == root else None
    out = torch.zeros(1)
    call(mode, dist.scatter, out, parts, root, s.group)
    assert out.tolist() == [5 + s.rank]


@on_groups
def test_barrier(mode, s):
    call(mode, dist.barrier, s.group)


@on_groups
def test_objects_and_monitored_barrier(mode, s):
    dist.monitored_barrier(s.group)
    objects = [{"rank": s.rank}, None]
    dist.broadcast_object_list(objects, s.members[1], s.group)
    assert objects == [{"rank": 1}, None]
    everyone = [None] * s.size
    dist.all_gather_object(everyone, ("rank", s.rank), s.group)
    assert everyone == [("rank", rank) for rank in range(s.size)]


@ranks(2)
def test_sequences_agree_on_all_ranks():
    """The numbers that a hang is compared by: equal on all ranks, whatever else each one sends."""
    half = dist.new_group([0, 1])
    if td.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        alone = dist.new_group([1], use_local_synchronization=True)
        dist.barrier(alone)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=half)
    seen = [(r.op, r.sequence) for r in dist.recent_operations() if not r.p2p and r.ranks == (0, 1)]
    everyone = [None] * 2
    td.all_gather_object(everyone, seen[-1:])
    assert everyone[0] == everyone[1] == [("all_reduce", 1)]


@ranks(3)
def test_a_rank_outside_the_group_is_left_alone():
    group = dist.new_group([0, 1])
    if td.get_rank() == 2:
        with pytest.warns(UserWarning, match="does not belong to the given group"):
            assert dist.all_reduce(torch.ones(1), group=group) is None
    else:
        dist.all_reduce(torch.ones(1), group=group)


@ranks(2)
def test_switched_off_collectives_move_nothing():
    os.environ["DS_COMM_ALL_GATHER_OFF"] = "1"
    out = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(out, values(1))
    assert torch.cat(out).tolist() == [0, 0]
    assert dist.all_gather_into_tensor(torch.zeros(2), values(1), async_op=True).wait()
    assert dist.all_gather_coalesced([torch.zeros(2)], [values(1)], async_op=True).wait()
    x = values(1)
    dist.all_reduce(x)
    assert x.tolist() == [2]
