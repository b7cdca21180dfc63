"""`init_distributed` with one process: environment, timeout, errors, the config argument."""

import datetime
import os
import types

import pytest
import torch
import torch.distributed as td

from deepspeed import comm
from deepspeed.comm.init import default_timeout
from deepspeed.errors import CommError, RendezvousError


def test_without_a_launcher_it_just_works(single):
    assert single.is_initialized()
    assert (single.get_rank(), single.get_world_size(), single.get_local_rank()) == (0, 1, 0)
    written = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR")}
    assert written == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    tensor = torch.ones(3)
    single.all_reduce(tensor)
    assert tensor.tolist() == [1, 1, 1]


def test_again_is_a_no_op_and_ending_allows_a_new_one(single):
    single.init_distributed("gloo")
    single.init_distributed(dist_init_required=False)
    single.init_distributed(dist_init_required=True)
    single.destroy_process_group()
    assert not single.is_initialized()
    single.init_distributed("gloo")
    single.barrier()


def test_an_existing_group_is_adopted(clean_env):
    td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
    try:
        comm.init_distributed("no-such-backend")
        comm.barrier()
        assert comm.recent_operations()[-1].op == "barrier"
        assert "RANK" not in os.environ
    finally:
        comm.destroy_process_group()


def test_the_backend_is_the_accelerators(clean_env, monkeypatch):
    from deepspeed.comm import init

    made = types.SimpleNamespace(communication_backend_name=lambda: "gloo", device_name=lambda: "other")
    monkeypatch.setattr(init, "get_accelerator", lambda: made)
    comm.init_distributed()
    try:
        assert td.get_backend() == "gloo"
    finally:
        comm.destroy_process_group()


def test_not_required_means_it_must_be_there(clean_env):
    with pytest.raises(CommError, match="dist_init_required=False"):
        comm.init_distributed(dist_init_required=False)


def test_partial_variables_are_refused_before_anything_waits(clean_env):
    clean_env.setenv("RANK", "0")
    with pytest.raises(RendezvousError, match="WORLD_SIZE not set"):
        comm.init_distributed("gloo")
    assert not comm.is_initialized()


def test_a_failed_rendezvous_says_who_and_where(clean_env, monkeypatch):
    def refuse(*args, **kwargs):
        raise td.DistNetworkError("connection refused")

    monkeypatch.setattr(td, "init_process_group", refuse)
    clean_env.setenv("MASTER_ADDR", "host0")
    said = r"rank 1 of 2 \(found by arguments\) could not join .* host0:29500 .* 'gloo' .* 0:00:05: connection refused"
    with pytest.raises(RendezvousError, match=said):
        comm.init_distributed("gloo", rank=1, world_size=2, timeout=datetime.timedelta(seconds=5))


@pytest.mark.parametrize(("text", "minutes"), [("", 10), ("30", 30), ("0.5", 0.5)])
def test_timeout_from_the_environment(text, minutes):
    assert default_timeout({"DEEPSPEED_TIMEOUT": text}) == datetime.timedelta(minutes=minutes)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_bad_timeout_is_named(text):
    with pytest.raises(RendezvousError, match=f"DEEPSPEED_TIMEOUT='{text}'"):
        default_timeout({"DEEPSPEED_TIMEOUT": text})


def test_the_timeout_reaches_torch(clean_env, monkeypatch):
    seen = {}
    monkeypatch.setattr(td, "init_process_group", lambda backend, **kwargs: seen.update(kwargs, backend=backend))
    monkeypatch.setattr("deepspeed.comm.shared_memory.meet", lambda group: None)
    clean_env.setenv("DEEPSPEED_TIMEOUT", "3")
    comm.init_distributed("gloo")
    assert (seen["backend"], seen["timeout"]) == ("gloo", datetime.timedelta(minutes=3))
    comm.init_distributed("gloo", timeout=datetime.timedelta(seconds=7))
    assert seen["timeout"] == datetime.timedelta(seconds=7)


@pytest.mark.parametrize(
    "config",
    [
        {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["barrier"]}},
        types.SimpleNamespace(
            comms_config=types.SimpleNamespace(enabled=True, prof_all=False, prof_ops=["barrier"], verbose=None)
        ),
        types.SimpleNamespace(
            comms_config=types.SimpleNamespace(
                comms_logger=types.SimpleNamespace(enabled=True, prof_all=False, prof_ops=("barrier",))
            )
        ),
    ],
)
def test_config_sets_up_the_logger_even_if_initialised(single, config):
    single.init_distributed(config=config)
    single.barrier()
    single.all_reduce(torch.ones(1))
    assert single.get_logged_comm_ops() == ["barrier"]


@pytest.mark.parametrize(
    "config", [{}, {"comms_logger": None}, {"comms_logger": {"enabled": False}}, {"comms_logger": {}}]
)
def test_a_disabled_section_stays_disabled(single, config):
    single.init_distributed(config=config)
    single.barrier()
    assert not single.has_comm_data()


def test_mpi_discovery_from_variables(clean_env):
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        clean_env.setenv(f"OMPI_COMM_WORLD_{name}", value)
    comm.mpi_discovery(distributed_port=4321)
    found = [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    assert found == ["1", "2", "1", "127.0.0.1", "4321"]


def test_mpi_discovery_without_mpi4py_says_what_to_do(clean_env, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RendezvousError, match="Install mpi4py"):
        comm.mpi_discovery()


def test_local_rank_comes_from_the_environment(clean_env):
    assert comm.get_local_rank() == 0
    clean_env.setenv("LOCAL_RANK", "5")
    assert comm.get_local_rank() == 5
    clean_env.setenv("LOCAL_RANK", "five")
    with pytest.raises(RendezvousError, match="LOCAL_RANK='five'"):
        comm.get_local_rank()


@pytest.mark.parametrize(
    "call",
    [comm.get_rank, comm.get_world_size, comm.get_world_group, comm.get_all_ranks_from_group, comm.get_global_rank],
)
def test_questions_before_initialisation_say_what_to_call(clean_env, call):
    with pytest.raises(CommError, match=r"deepspeed\.init_distributed"):
        call()
