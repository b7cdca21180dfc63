"""Collectives through memory that ranks of one host share: gloo's numbers, any order of waits, and real faults."""

import errno
import os
import re
import signal

import pytest
import torch
import torch.distributed as td

from deepspeed import comm as dist
from deepspeed.comm import shared_memory
from deepspeed.comm.watch import HangSettings
from deepspeed.errors import CommError
from tests.hanging import TIMEOUT, linger, play
from tests.harness import ranks

ENOUGH = shared_memory.SMALLEST // 4  # elements of fp32 that go through shared memory
OPS = [td.ReduceOp.SUM, td.ReduceOp.MAX, td.ReduceOp.MIN]


def draws(rank, count, dtype=torch.float32):
    return (torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 8).to(dtype)


def shared():
    found = shared_memory._known.get(td.GroupMember.WORLD)
    assert found is not None, "the ranks share memory"
    return found


@ranks(2, 3)
def test_numbers_are_those_of_torch():
    rank, world = td.get_rank(), td.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for op in OPS:
            count = world * ENOUGH * 2 + world
            ours, theirs = draws(rank, count, dtype), draws(rank, count, dtype)
            dist.all_reduce(ours, op)
            td.all_reduce(theirs, op)
            near = {} if world == 2 or op != td.ReduceOp.SUM else {"rtol": 0.02, "atol": 0.2}  # in another order
            torch.testing.assert_close(ours, theirs, **(near or {"rtol": 0, "atol": 0}))
            ours, theirs = torch.empty(count // world, dtype=dtype), torch.empty(count // world, dtype=dtype)
            dist.reduce_scatter_tensor(ours, draws(rank, count, dtype), op)
            td.reduce_scatter_tensor(theirs, draws(rank, count, dtype), op)
            torch.testing.assert_close(ours, theirs, **(near or {"rtol": 0, "atol": 0}))
    for dtype in (torch.float32, torch.bool, torch.complex64):
        values = draws(rank, 8 * ENOUGH).to(dtype)
        ours, theirs = values.new_empty(world * len(values)), values.new_empty(world * len(values))
        dist.all_gather_into_tensor(ours, values)
        td.all_gather_into_tensor(theirs, values)
        assert torch.equal(ours, theirs)
    assert shared()._begun == 4 * 3 * 2 + 2  # complex numbers go the way of torch


@ranks(2)
def test_works_are_waited_for_in_any_order_or_never():
    """Each rank waits in its own order; a work that is never waited for keeps its place until its turn comes."""
    rank, many = td.get_rank(), shared_memory._SLOTS + 7
    dist.all_reduce(torch.ones(ENOUGH))  # ranks meet
    tensors = [torch.full((ENOUGH,), float(n % 100)) for n in range(many)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    waited = works[::-2] if rank else works[::3]
    for work in waited:
        work.wait()
    works[-1].wait()
    assert works[-1].is_completed()
    assert torch.equal(works[5].get_future().wait()[0], tensors[5])
    for work in works:
        work.wait()
    assert all(torch.equal(t, torch.full((ENOUGH,), 2.0 * (n % 100))) for n, t in enumerate(tensors))
    dist.barrier()
    group = shared()
    before = group._own.size
    for _ in range(20):
        dist.all_reduce(torch.ones(4 * ENOUGH))
    assert group._own.size == before, "places are used again once all have read them"


@ranks(2)
def test_what_this_rank_has_not_read_itself_stays():
    """The others have read it long ago, and later operations need places."""
    dist.all_reduce(torch.ones(ENOUGH))
    mine, late = torch.full((ENOUGH,), 1.0 + td.get_rank()), torch.empty(2 * ENOUGH)
    work = dist.all_gather_into_tensor(late, mine, async_op=True)
    if td.get_rank():
        work.wait()
    for _ in range(2 * shared_memory._SLOTS):
        dist.all_reduce(torch.full((ENOUGH,), 7.0))
    work.wait()
    assert torch.equal(late, torch.tensor([1.0, 2.0]).repeat_interleave(ENOUGH))


@ranks(2)
def test_autograd_sees_no_change():
    """As with a backend's own writes; and a first call that returns at once waits for nobody."""
    leaf, store = torch.ones(ENOUGH, requires_grad=True), td.distributed_c10d._get_default_store()
    group = dist.new_group()
    if td.get_rank():
        store.wait(["begun"])
    work = dist.all_reduce(leaf, group=group, async_op=True)
    store.set("begun", "")
    work.wait()
    assert group not in shared_memory._known
    before = leaf._version
    dist.all_reduce(leaf, group=group)
    assert shared_memory._known[group] is not None
    assert (leaf._version, float(leaf[0])) == (before, 4.0)


@ranks(2)
def test_what_goes_another_way():
    """Small messages, other ops and switched off: torch's own function; other groups: memory of their own."""
    dist.all_reduce(torch.ones(ENOUGH - 1))
    dist.all_reduce(torch.ones(ENOUGH), td.ReduceOp.PRODUCT)
    assert td.GroupMember.WORLD not in shared_memory._known
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(ENOUGH), group=group)
    assert td.GroupMember.WORLD not in shared_memory._known
    assert shared_memory._known[group] is not None
    descriptors = len(os.listdir("/proc/self/fd"))
    dist.destroy_process_group(group)
    assert len(os.listdir("/proc/self/fd")) <= descriptors - 2
    os.environ["DS_COMM_SHARED_MEMORY"] = "0" if td.get_rank() else "1"
    try:
        dist.all_reduce(values := torch.ones(ENOUGH))
    finally:
        del os.environ["DS_COMM_SHARED_MEMORY"]
    assert shared_memory._known[td.GroupMember.WORLD] is None
    assert float(values[0]) == 2


@ranks(2)
def test_a_rank_without_descriptors_left(monkeypatch):
    """All ranks go the other way, and keep no file open."""

    def refuse(name):
        raise OSError(errno.EMFILE, "Too many open files")

    dist.all_reduce(torch.ones(1))  # the hang watch begins
    if td.get_rank():
        monkeypatch.setattr(os, "memfd_create", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    dist.all_reduce(values := torch.ones(ENOUGH))
    assert float(values[0]) == 2
    assert shared_memory._known[td.GroupMember.WORLD] is None
    assert len(os.listdir("/proc/self/fd")) == descriptors


@ranks(2)
def test_another_size():
    with pytest.raises(CommError, match=r"rank \d of the group sends (131072|262144) bytes"):
        dist.all_reduce(torch.ones(ENOUGH * (4 + 4 * td.get_rank())))
    shared_memory.forget(td.GroupMember.WORLD)


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3])
def test_counts_wrap(start):
    """The published number has 32 bits."""

    def signed(number):
        return (number + 2**31) % 2**32 - 2**31

    for ahead in range(6):
        assert shared_memory._behind(signed(start), start + ahead) == ahead
        assert shared_memory._behind(signed(start + ahead), start) == -ahead


def die(rank):
    dist.all_reduce(torch.ones(ENOUGH))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(ENOUGH))


def skip(rank):
    dist.all_reduce(torch.ones(ENOUGH))
    if rank == 1:
        linger()
    dist.all_reduce(torch.ones(ENOUGH))


@ranks(1, init=False)
def test_a_killed_and_a_late_rank_are_named():
    said = play(die)
    for rank in (0, 2):
        assert re.search(r"rank 1 is dead: its process \d+ on \S+ was killed or crashed", said[rank].error)
    said = play(skip, forever=[1], settings=HangSettings(timeout=TIMEOUT, patience=50.0))
    for rank in (0, 2):
        assert "rank 1 never entered all_reduce 4 on group world" in said[rank].error
        assert "timed out while waiting for other ranks to begin the operation" in said[rank].text
