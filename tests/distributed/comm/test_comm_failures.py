"""Real failures between ranks: a mismatch on one, a rank that dies, a rank that never comes."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as td
from torch.distributed.distributed_c10d import _set_pg_timeout

from deepspeed import comm as dist
from deepspeed.errors import CommError
from tests.harness import ranks, store_path


@ranks(2)
def test_a_mismatch_on_one_rank_is_told_there():
    """Rank 1 gives a wrong output and learns that at once; rank 0 did nothing wrong and waits for it in vain."""
    group = dist.new_group([0, 1])
    dist.barrier(group)
    _set_pg_timeout(timedelta(seconds=1), group)  # only now: until here a slow machine may take its time
    with dist.labelled("encoder.weight"), pytest.raises(CommError) as raised:
        dist.all_gather_into_tensor(torch.zeros(4 - td.get_rank()), torch.ones(2), group)
    text = str(raised.value)
    assert "is stuck" not in text, "rank 1 has left the call with an error of its own"
    for part in (
        f"all_gather_into_tensor failed on rank {td.get_rank()}: collective #2",
        "ranks [0, 1]",
        "encoder.weight",
        "test_comm_failures.py:",
        "#1 barrier",
    ):
        assert part in text
    if td.get_rank() == 1:
        assert "float32[3], float32[2]" in text
    else:
        assert "ranks [0, 1] did not make this call in time" in text
    assert raised.value.__cause__ is not None


@ranks(2, init=False)
def test_a_rank_that_never_comes():
    """A short timeout stands for the ten minutes of a real job."""
    dist.init_distributed("gloo", init_method=f"file://{store_path()}")
    dist.all_reduce(torch.ones(1))
    _set_pg_timeout(timedelta(seconds=1))
    if td.get_rank() == 1:
        td.distributed_c10d._get_default_store().wait(["rank 0 is done"], timedelta(seconds=100))
        return
    with pytest.raises(CommError, match=r"all_reduce failed on rank 0: collective #2") as raised:
        dist.all_reduce(torch.ones(4))
    assert str(raised.value).startswith("rank 1 never entered all_reduce 2 on group world; its main thread is in ")
    for clue in ("did not make this call in time", "operations before it"):
        assert clue not in str(raised.value), "the rank is known"
    handle = None
    with pytest.raises(CommError, match="collective #3"):
        handle = dist.all_reduce(torch.ones(4), async_op=True)
        handle.wait()
    td.distributed_c10d._get_default_store().set("rank 0 is done", "1")


@ranks(2)
def test_a_rank_that_dies():
    """A forked child plays the rank that is killed, so that the test's own ranks stay."""
    import signal
    import tempfile

    parent = td.get_rank()
    td.barrier()
    if parent == 1:
        return
    td.destroy_process_group()
    path = tempfile.mktemp()
    child = os.fork()
    rank = 1 if child == 0 else 0
    td.init_process_group("gloo", store=td.FileStore(path, 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError, match=r"rank 1 (is dead|does not answer)") as raised:
        dist.all_reduce(torch.ones(2, 2))
    os.waitpid(child, 0)
    os.unlink(path)
    for part in ("all_reduce failed on rank 0: collective #2", "float32[2, 2]"):
        assert part in str(raised.value)
