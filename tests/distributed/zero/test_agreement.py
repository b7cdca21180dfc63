"""What ranks agree upon, on real ranks: numbers, unions, and how long they wait for one that does not come."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.agreement import Collector, begin_to_gather_words, gather_words, unite
from deepspeed.comm.point_to_point import gather_parts
from deepspeed.errors import CommError
from deepspeed.parallel import ParallelLayout
from deepspeed.zero.agreement import RankAgreement
from tests.harness import ranks, shared_ranks, store_path


@shared_ranks(1, 2, 3, 5, 9)
def test_words_and_unions():
    rank, world = dist.get_rank(), dist.get_world_size()
    for turn in range(3):
        words = gather_words(torch.tensor([rank + turn, rank * rank]))
        assert words.tolist() == [[each + turn, each * each] for each in range(world)]
        for collector in range(-1, world):
            words = gather_words(torch.tensor([rank * turn]), collector=Collector(collector))
            assert words.tolist() == [[each * turn] for each in range(world)], f"collected by {collector}"
        later = begin_to_gather_words(torch.tensor([rank - turn]))
        assert later.wait().tolist() == [[each - turn] for each in range(world)], "of what was waited for later"
        mask = torch.zeros(2 * world, dtype=torch.uint8)
        mask[rank] = 1
        assert unite(mask).tolist() == [1] * world + [0] * world


@shared_ranks(1, 2, 3, 5, 9)
@pytest.mark.parametrize("listens", [True, False])
def test_the_first_rank_may_listen_before_the_end(listens):
    """Other exchanges come in between, and not every end is listened for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    agreement = RankAgreement(ParallelLayout.build().world)
    for turn in range(4):
        if listens and turn != 2:
            agreement.receive_early(2)
            agreement.receive_early(2)  # once is enough
        assert agreement.exchange([rank, turn], "in between").tolist() == [[each, turn] for each in range(world)]
        assert agreement.union({rank}, world) == set(range(world))
        found = agreement.exchange_at_end([rank * turn, 5], "end of a test")
        assert found.tolist() == [[each * turn, 5] for each in range(world)]


@shared_ranks(2, 3)
def test_parts_are_gathered_where_they_belong():
    rank, world = dist.get_rank(), dist.get_world_size()
    handles = []
    outs = [torch.empty(world * size) for size in (1, 5, 1000)]
    for out in outs:
        part = torch.full((out.numel() // world,), float(rank))
        handles.append(gather_parts(out, part, async_op=True))
    for handle in reversed(handles):
        handle.wait()
    for out in outs:
        assert out.view(world, -1).tolist() == [[float(each)] * (out.numel() // world) for each in range(world)]


@shared_ranks(2, 3)
def test_agreement_say_and_unite_and_tell():
    rank, world = dist.get_rank(), dist.get_world_size()
    agreement = RankAgreement(ParallelLayout.build().world)
    assert agreement.exchange([rank, 7], "test")[:, 0].tolist() == list(range(world))
    assert agreement.union({rank, 9}, 10) == {*range(world), 9}
    assert agreement.broadcast_numbers([3, 1, 2] if rank == 0 else [], 3) == [3, 1, 2]
    error = agreement.disagreement(f"is at place {rank}")
    assert all(f"rank {each} is at place {each}" in str(error) for each in range(world))
    same = str(agreement.disagreement("waits"))
    assert f"ranks {', '.join(map(str, range(world)))} waits" in same


@shared_ranks(3)
def test_what_all_agreement_say_does_not_meet_what_others_send():
    """It goes over the world itself where that is gloo's, whose groups have a thread each."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    layout = ParallelLayout.build()
    groups = len(dist.distributed_c10d._world.pg_map)
    received = torch.zeros(1)
    works = [dist.irecv(received, last)] if rank < last else []
    assert RankAgreement(layout.world).exchange_at_end([rank, 1], "test")[:, 0].tolist() == [0, 1, 2]
    assert RankAgreement(layout.world).union({rank}, 3) == {0, 1, 2}
    assert len(dist.distributed_c10d._world.pg_map) == groups
    if rank == last:
        works = [dist.isend(torch.tensor([5.0]), each) for each in range(last)]
    for work in works:
        work.wait()
    assert rank == last or received.item() == 5.0
    assert layout["dp"].host_group is not layout["dp"].group, "they say things while its collectives are under way"


@ranks(2, timeout=120, init=False)
def test_a_group_waits_as_long_as_its_world():
    """Not for the half hour that torch gives a group by default."""
    rank = int(os.environ["RANK"])
    where = f"file://{store_path()}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=10))
    store = dist.distributed_c10d._get_default_store()
    agreement = RankAgreement(ParallelLayout.build().world)
    if rank == 0:
        with pytest.raises((CommError, RuntimeError)):
            agreement.exchange([1], "begin of something")
        store.set("told", "yes")
    else:  # it never comes
        store.wait(["told"], timedelta(seconds=100))
