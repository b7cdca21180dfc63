"""`init_distributed` among ranks."""

import os

import pytest
import torch
import torch.distributed as td

from deepspeed import comm as dist
from deepspeed.errors import RendezvousError
from tests.harness import ranks, store_path


@ranks(2, init=False)
def test_from_the_environment_with_an_init_method():
    dist.init_distributed("gloo", init_method=f"file://{store_path()}")
    assert dist.get_world_size() == 2
    assert dist.get_rank() == int(os.environ["RANK"])
    assert "MASTER_ADDR" not in os.environ
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@ranks(2, init=False)
def test_from_arguments():
    rank = int(os.environ.pop("RANK"))
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        os.environ.pop(name, None)
    dist.init_distributed("gloo", init_method=f"file://{store_path()}", rank=rank, world_size=2)
    assert (td.get_rank(), os.environ["RANK"], os.environ["WORLD_SIZE"]) == (rank, str(rank), "2")
    with pytest.raises(RendezvousError, match="LOCAL_RANK"):
        dist.get_local_rank()


@ranks(2, init=False)
def test_from_mpi_variables():
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_SIZE"}
    for ours, theirs in names.items():
        os.environ[f"OMPI_COMM_WORLD_{theirs}"] = os.environ.pop(ours)
    dist.init_distributed("gloo", init_method=f"file://{store_path()}")
    assert dist.get_local_rank() == dist.get_rank() == int(os.environ["OMPI_COMM_WORLD_RANK"])


@ranks(2)
def test_an_existing_group_is_adopted():
    dist.init_distributed("no-such-backend", dist_init_required=False)
    dist.barrier()
