"""A world of one rank inside the test process, and a quiet comms logger."""

import pytest
import torch.distributed as td

from deepspeed import comm

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def clean_env(monkeypatch):
    """No launcher variables; those that a test's code writes are gone afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # recorded, so that it is restored even if the code under test writes it
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def single(clean_env):
    """torch.distributed with one rank, ended afterwards."""
    comm.init_distributed("gloo")
    yield comm
    comm.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
    comm.reset_log()
    if td.is_initialized():
        comm.destroy_process_group()
