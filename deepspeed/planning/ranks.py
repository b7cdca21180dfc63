"""One process as any rank of a world that does not exist: torch's fake process group, and all that it leaves behind."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as td

from deepspeed import comm
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.comm.groups import FAKE_PLAYS
from deepspeed.errors import UsageError

_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *(FAKE_PLAYS, "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
)


@contextmanager
def pretended_rank(rank: int, world: int, per_node: int, backend: str = "nccl") -> Iterator[None]:
    """This process is that rank, sends as over that backend, and is what it was afterwards."""
    if td.is_initialized():
        raise UsageError(
            "a plan pretends to be a rank of another world, but torch.distributed is initialised in this process. Call "
            "plan() before deepspeed.initialize, or in a process of its own (ds_plan)"
        )
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    before = {name: os.environ.pop(name, None) for name in _VARIABLES}
    random, device, threads = torch.get_rng_state(), get_accelerator(), torch.get_num_threads()
    nodes = min(per_node, world)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % nodes),
        LOCAL_SIZE=str(nodes),
        LOCAL_WORLD_SIZE=str(nodes),
        **({FAKE_PLAYS: backend} if backend != "nccl" else {}),
    )
    try:
        set_accelerator(CPU_Accelerator())
        td.init_process_group("fake", rank=rank, world_size=world, store=fake.FakeStore())
        yield
    finally:
        if td.is_initialized():
            comm.destroy_process_group()
        set_accelerator(device)
        torch.set_rng_state(random)
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
