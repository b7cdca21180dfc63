"""What is watched: calls of torch itself, several groups, handles, agreements, further worlds, engines."""

import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as td

from deepspeed import comm as dist
from deepspeed.comm.agreement import gather_words
from deepspeed.comm.watch import HangSettings, threads, watcher
from tests.hanging import TIMEOUT, linger, play
from tests.harness import ranks


def skip(rank):
    if rank == 1:
        linger()
    dist.all_reduce(torch.ones(8))


def call_torch(rank):
    if rank == 1:
        linger()
    td.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_calls_of_torch_itself():
    said = play(call_torch, forever=[1])
    for rank in (0, 2):
        assert f"torch.distributed.all_reduce failed on rank {rank}: rank 1 never entered" in said[rank].error
        assert "torch.distributed.all_reduce 3 on group world; its main thread is in" in said[rank].error
        assert re.search(r"called at : .*test_hangs_calls.py:\d+ `td.all_reduce\(torch.ones\(8\)\)`", said[rank].error)


def two_groups(rank):
    """Ranks 0 and 1 have a group; rank 2 waits for both in the world, and rank 0 for rank 1 in the group."""
    group = dist.new_group([0, 1], group_desc="dp")
    if rank == 1:
        linger()
    if rank == 0:
        dist.all_gather_into_tensor(torch.ones(8), torch.ones(4), group)
    dist.barrier()


@ranks(1, init=False)
def test_ranks_that_wait_in_several_groups():
    said = play(two_groups, forever=[1])
    for rank in (0, 2):
        assert re.match(r"rank 1 never entered \w+ \d on group (dp|world); its main thread is in", said[rank].error)


def wait_later(rank):
    """An asynchronous operation: the rank waits in its handle."""
    if rank == 1:
        linger()
    dist.all_reduce(torch.ones(8), async_op=True).wait()


@ranks(1, init=False)
def test_a_handle_that_is_waited_for():
    said = play(wait_later, world=2, forever=[1])
    assert "rank 1 never entered all_reduce 3 on group world; its main thread is in" in said[0].error


def receive(rank):
    if rank == 1:
        linger()
    dist.irecv(torch.ones(8), 1).wait(timedelta(seconds=TIMEOUT))  # gloo lets messages take what it was made with


@ranks(1, init=False)
def test_a_message_that_is_never_sent():
    said = play(receive, world=2, forever=[1])
    assert "rank 1 did not do its part of irecv 1 on group world; its main thread is in" in said[0].error


def agree(rank):
    if rank == 1:
        linger()
    gather_words(torch.ones(2, dtype=torch.int64))


@ranks(1, init=False)
def test_an_agreement_of_hosts_is_limited_by_the_config():
    """Its messages go over a group that was made with a longer time."""
    said = play(agree, forever=[1])
    for rank in (0, 2):
        assert "rank 1 never entered gather_words 3 on group world; its main thread is in" in said[rank].error


def launch(rank):
    """Hosts that only launch collectives, as with NCCL: this one then waits for its device, in no call of ours."""
    threads.is_launched = lambda backend: True
    if rank == 1:
        linger()
    work = dist.all_reduce(torch.ones(8), async_op=True)
    while work is not None:
        time.sleep(0.01)


@ranks(1, init=False)
def test_a_collective_that_is_only_launched():
    said = play(launch, forever=[1])
    for rank in (0, 2):
        assert "all_reduce 3 on group world did not complete: rank 1 never entered all_reduce 3" in said[rank].error
        assert "its main thread is in tests/hanging.py" in said[rank].error


def go_on_alone(rank):
    """All have launched everything, and one is busy for longer than a collective may take."""
    threads.is_launched = lambda backend: True
    dist.all_reduce(torch.ones(8))
    if rank == 1:
        until = time.monotonic() + 2 * TIMEOUT
        while time.monotonic() < until:
            time.sleep(0.01)


@ranks(1, init=False)
def test_a_host_that_is_busy_for_long_is_left_alone():
    said = play(go_on_alone)
    assert [one.status for one in said] == [0] * 3
    assert not any("[deepspeed]" in one.text or "CommError" in one.text for one in said)


def again(rank):
    """A world after a world: it has a watcher of its own, and forked children have none."""
    store = td.distributed_c10d._get_default_store()
    first = dist.dispatcher.watch._watcher
    child = os.fork()
    if child == 0:
        os._exit(0 if not dist.dispatcher.watch.running and threading.active_count() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.dispatcher.watch.running
    td.init_process_group(
        "gloo", store=td.PrefixStore("again", store), rank=rank, world_size=3, timeout=timedelta(seconds=100)
    )
    dist.barrier()
    assert dist.dispatcher.watch._watcher is not first
    first._thread.join()
    dist.watch_hangs(HangSettings(enabled=False))
    assert not dist.dispatcher.watch.running
    dist.barrier()
    assert not dist.dispatcher.watch.running
    dist.watch_hangs(HangSettings(timeout=TIMEOUT, patience=50, folder=Path(os.environ["TEST_STORE"])))
    dist.barrier()
    skip(rank)


@ranks(1, init=False)
def test_a_second_world_is_watched_as_well():
    said = play(again, forever=[1])
    for rank in (0, 2):
        assert "rank 1 never entered all_reduce 4 on group world" in said[rank].error


def configured(rank):
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Sequential(torch.nn.Linear(64, 64)),
        config={**config, "hangs": {"timeout": TIMEOUT, "patience": 50, "folder": os.environ["TEST_STORE"]}},
    )
    for step in range(3):
        loss = engine(torch.ones(1, 64)).sum()
        if step == 2 and rank == 1:
            linger()
        engine.backward(loss)
        engine.step()


@ranks(1, init=False)
def test_an_engine_and_its_config():
    """Stage 3: the groups are the library's own, and the timeout is the config's."""
    said = play(configured, forever=[1], settings=HangSettings(timeout=100, patience=50))
    for rank in (0, 2):
        assert re.match(r"rank 1 never entered \S+ \d+ of `.+` on group .+; its main thread is in", said[rank].error)
        assert f"stacks   : {os.environ['TEST_STORE']}" in said[rank].error


@ranks(2)
def test_threads_are_left_alone_while_collectives_go_on():
    """Whoever has a frame keeps alive what is in it, so that memory would be freed late."""
    looks = mock.patch.object(watcher, "active_calls", return_value=[])
    counts = mock.patch.object(watcher, "positions", side_effect=threads.positions)
    with looks as looked, counts as counted:
        enough = torch.zeros(1)
        while not enough:
            enough = torch.tensor([float(counted.call_count >= 5)])
            dist.all_reduce(enough, op=dist.ReduceOp.MIN)
    assert not looked.called
