"""Discovery over environment mappings: each launcher, conflicts, partial sets. No process, no os.environ."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.discover import RankFacts, discover, facts_of, from_arguments
from deepspeed.errors import RendezvousError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "1234",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ONE_NODE_OMPI = {**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "node[01-03,7]",
}


def find(env, **kwargs):
    return discover(env, **{"port": 29500, **kwargs})


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


def test_nothing_is_a_single_process():
    assert find({}) == RankFacts(0, 1, 0, 1, "127.0.0.1", 29500, "single process")


def test_torchrun():
    assert find(TORCHRUN) == RankFacts(3, 4, 1, 2, "host0", 1234, "environment")


def test_master_port_defaults_to_the_argument():
    assert find(without(TORCHRUN, "MASTER_PORT"), port=777).master_port == 777


def test_world_of_one_needs_no_address():
    facts = find({"RANK": "0", "WORLD_SIZE": "1"})
    assert facts == RankFacts(0, 1, 0, 1, "127.0.0.1", 29500, "environment")


@pytest.mark.parametrize("hosts", ["SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_NODELIST"])
def test_slurm(hosts):
    env = {**without(SLURM, "SLURM_JOB_NODELIST"), hosts: "node[01-03,7]"}
    assert find(env, port=4000) == RankFacts(3, 4, 1, None, "node01", 4000, "Slurm")


def test_a_slurm_step_counts_before_its_job():
    env = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "other9"}
    assert (find(env).world_size, find(env).master_addr) == (8, "other9")


def test_slurm_with_an_exported_address():
    facts = find({**SLURM, "MASTER_ADDR": "chosen", "MASTER_PORT": "99"})
    assert (facts.rank, facts.master_addr, facts.master_port) == (3, "chosen", 99)


def test_torchrun_under_srun_is_torchrun():
    """One agent per machine: Slurm's task number is the machine's, not the rank."""
    env = {**SLURM, **TORCHRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert find(env) == find(TORCHRUN)
    assert find(without(env, "TORCHELASTIC_RUN_ID")) == find(TORCHRUN)


def test_slurm_fills_what_agreeing_variables_leave_out():
    facts = find({**SLURM, "RANK": "3", "WORLD_SIZE": "4"})
    assert (facts.local_rank, facts.master_addr) == (1, "node01")


def test_open_mpi_on_one_machine_needs_no_address():
    assert find(ONE_NODE_OMPI) == RankFacts(3, 4, 3, 4, "127.0.0.1", 29500, "Open MPI")


def test_open_mpi_with_an_address():
    assert find({**OMPI, "MASTER_ADDR": "h"}) == RankFacts(3, 4, 1, 2, "h", 29500, "Open MPI")


def test_open_mpi_inside_slurm_believes_mpi_and_takes_the_address():
    env = {**OMPI, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n[3-4]"}
    assert find(env) == RankFacts(3, 4, 1, 2, "n3", 29500, "Open MPI")


def test_mvapich():
    env = {name.replace("OMPI", "MV2"): value for name, value in ONE_NODE_OMPI.items()}
    assert find(env) == RankFacts(3, 4, 3, 4, "127.0.0.1", 29500, "MVAPICH")


@pytest.mark.parametrize("local", ["MPI_LOCALRANKID", "PALS_LOCAL_RANKID"])
def test_mpich(local):
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", local: "1", "MPI_LOCALNRANKS": "2"}
    assert find(env) == RankFacts(1, 2, 1, 2, "127.0.0.1", 29500, "MPICH")


def test_mpi_ranks_with_a_world_from_the_launcher():
    """The MPI runners of the launcher export the job's facts but not the rank's."""
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    assert find(env) == RankFacts(1, 2, 0, None, "h", 29500, "MPICH")


def test_mpi_is_asked_only_for_what_is_missing():
    asked = RankFacts(3, 4, 1, 2, "10.0.0.1", 29500, "mpi4py")
    assert find(OMPI, probe=lambda: asked) == RankFacts(3, 4, 1, 2, "10.0.0.1", 29500, "Open MPI")
    assert find({"PMI_RANK": "3", "PMI_SIZE": "4"}, probe=lambda: asked).local_rank == 1

    def never():
        raise AssertionError("MPI was asked")

    find(ONE_NODE_OMPI, probe=never)
    find(TORCHRUN, probe=never)
    find({}, probe=never)


def test_mpi_is_ignored_on_request():
    assert find(ONE_NODE_OMPI, auto_mpi=False).source == "single process"
    assert find({**TORCHRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, auto_mpi=False).rank == 3


def test_mpi4py_facts():
    class Comm:
        def __init__(self, rank, size, node=None):
            self.rank, self.size, self.node, self.freed = rank, size, node, False

        def Get_rank(self):
            return self.rank

        def Get_size(self):
            return self.size

        def Split_type(self, kind):
            assert kind == 42
            return self.node

        def Free(self):
            self.freed = True

        def bcast(self, value, root):
            assert root == 0
            return "10.1.1.1" if self.rank else value

    node = Comm(1, 2)
    assert facts_of(Comm(3, 4, node), 42, 5) == RankFacts(3, 4, 1, 2, "10.1.1.1", 5, "mpi4py")
    assert node.freed
    assert facts_of(Comm(0, 2, Comm(0, 2)), 42, 5).master_addr == "127.0.0.1"


def test_azure_ml_on_several_machines():
    env = {**OMPI, "AZUREML_EXPERIMENT_ID": "e", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
    assert find(env) == RankFacts(3, 4, 1, 2, "10.0.0.4", 6105, "Open MPI")


def test_azure_ml_on_one_machine():
    env = {**ONE_NODE_OMPI, "AZUREML_EXPERIMENT_ID": "e", "AZ_BATCHAI_MPI_MASTER_NODE": "m"}
    assert find(env) == RankFacts(3, 4, 3, 4, "m", 54965, "Open MPI")


def test_azure_ml_without_a_master_node():
    with pytest.raises(RendezvousError, match="AZ_BATCH_MASTER_NODE not set"):
        find({**OMPI, "AZUREML_EXPERIMENT_ID": "e"})


def test_sagemaker():
    env = {**OMPI, "SM_TRAINING_ENV": "{}", "SM_HOSTS": json.dumps(["algo-1", "algo-2"])}
    assert find(env) == RankFacts(3, 4, 1, 2, "algo-1", 29500, "Open MPI")
    with pytest.raises(RendezvousError, match="SM_HOSTS='nonsense'"):
        find({**env, "SM_HOSTS": "nonsense"})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({**TORCHRUN, **OMPI, "OMPI_COMM_WORLD_RANK": "1"}, ["RANK='3'", "OMPI_COMM_WORLD_RANK='1'", "Open MPI"]),
        ({**TORCHRUN, **OMPI, "OMPI_COMM_WORLD_SIZE": "8"}, ["WORLD_SIZE='4'", "OMPI_COMM_WORLD_SIZE='8'"]),
        ({**TORCHRUN, **OMPI, "LOCAL_RANK": "0"}, ["LOCAL_RANK='0'", "OMPI_COMM_WORLD_LOCAL_RANK='1'"]),
        ({**ONE_NODE_OMPI, "LOCAL_RANK": "0"}, ["LOCAL_RANK='0'", "OMPI_COMM_WORLD_LOCAL_RANK='3'"]),
        ({**SLURM, "RANK": "0"}, ["RANK='0'", "SLURM_PROCID='3'", "Slurm"]),
        ({**SLURM, "WORLD_SIZE": "2"}, ["WORLD_SIZE='2'", "SLURM_NTASKS='4'"]),
        ({**TORCHRUN, "RANK": "4"}, ["RANK='4'", "WORLD_SIZE='4'", "0 to 3"]),
        ({**SLURM, "SLURM_PROCID": "9"}, ["SLURM_PROCID='9'", "SLURM_NTASKS='4'"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK='2'", "LOCAL_WORLD_SIZE='2'"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE='5'", "WORLD_SIZE='4'"]),
        ({**TORCHRUN, "RANK": "one"}, ["RANK='one'", "whole number"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE='0'"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "x", "MASTER_ADDR": "h"}, ["OMPI_COMM_WORLD_SIZE='x'"]),
        ({"RANK": "0"}, ["RANK='0'", "WORLD_SIZE not set", "torchrun"]),
        ({"RANK": "0", "WORLD_SIZE": ""}, ["WORLD_SIZE=''"]),
        ({"WORLD_SIZE": "2"}, ["RANK not set", "WORLD_SIZE='2'"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK='0'", "RANK not set"]),
        ({"MASTER_ADDR": "h"}, ["MASTER_ADDR='h'", "RANK not set", "unset them all"]),
        (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR not set", "RANK='3'"]),
        (without(TORCHRUN, "LOCAL_RANK"), ["LOCAL_RANK not set"]),
        (OMPI, ["MASTER_ADDR not set", "OMPI_COMM_WORLD_RANK='3'", "mpi4py"]),
        (without(OMPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_SIZE not set", "OMPI_COMM_WORLD_RANK='3'"]),
        (without(SLURM, "SLURM_NTASKS"), ["SLURM_NTASKS not set", "SLURM_PROCID='3'"]),
        (without(SLURM, "SLURM_LOCALID"), ["LOCAL_RANK not set", "SLURM_PROCID='3'"]),
        (without(SLURM, "SLURM_JOB_NODELIST"), ["MASTER_ADDR not set"]),
        ({**SLURM, "SLURM_JOB_NODELIST": "n["}, ["'n['"]),
    ],
)
def test_what_does_not_describe_one_job_is_named(env, said):
    with pytest.raises(RendezvousError) as raised:
        find(env)
    for text in said:
        assert text in str(raised.value)


@pytest.mark.parametrize("stray", ["abc", "-1", "0", "5", "1", "9" * 5000])
def test_a_stray_local_size_is_told_and_not_used(stray):
    """5 is more than the job has, 1 is not above local rank 1."""
    for env, size in [
        (TORCHRUN, 2),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), None),
        ({**OMPI, "MASTER_ADDR": "h"}, 2),
        (SLURM, None),
    ]:
        facts = find({**env, "LOCAL_SIZE": stray})
        assert facts.local_size == size
        assert "LOCAL_SIZE=" in facts.doubts[0]
        assert replace(facts, doubts=()) == find(env)
    if stray != "1":
        alone = find({"LOCAL_SIZE": stray})
        assert (alone.world_size, alone.local_size, len(alone.doubts)) == (1, 1, 1)
    (doubt,) = from_arguments({**TORCHRUN, "LOCAL_SIZE": stray}, 2, 4, 5, True).doubts
    assert "this machine runs 2 of the job's ranks" in doubt


def test_a_local_size_that_fits_counts():
    """DeepSpeed's launcher sets no other."""
    env = {**without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_SIZE": "2"}
    assert find(env) == find(TORCHRUN)
    assert find(env).doubts == ()
    assert find({**TORCHRUN, "LOCAL_SIZE": "2"}).doubts == ()


def test_an_init_method_replaces_the_address():
    env = without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
    assert find(env, need_master=False) == RankFacts(3, 4, 1, 2, None, None, "environment")


def test_arguments_win_over_the_environment():
    facts = from_arguments({**TORCHRUN, "RANK": "0"}, 2, 4, 5, True)
    assert facts == RankFacts(2, 4, 1, 2, "host0", 1234, "arguments")
    assert from_arguments(TORCHRUN, -1, 8, 5, True).rank == 3
    assert from_arguments({}, 1, 2, 5, False) == RankFacts(1, 2, None, None, None, None, "arguments")
    assert from_arguments({}, 0, 1, 5, True) == RankFacts(0, 1, 0, 1, "127.0.0.1", 5, "arguments")


@pytest.mark.parametrize(
    ("rank", "world", "said"),
    [(0, -1, "WORLD_SIZE not set"), (-1, 2, "RANK not set"), (2, 2, "0 to 1"), (0, 2, "MASTER_ADDR not set")],
)
def test_incomplete_arguments(rank, world, said):
    with pytest.raises(RendezvousError, match=said):
        from_arguments({}, rank, world, 5, True)


names = st.sampled_from(sorted({*TORCHRUN, *OMPI, *SLURM, "PMI_RANK", "PMI_SIZE", "AZUREML_EXPERIMENT_ID"}))


@given(st.dictionaries(names, st.one_of(st.integers(-1, 5).map(str), st.sampled_from(["", "x", "n[1-2]"]))))
def test_any_environment_gives_sound_facts_or_one_kind_of_error(env):
    before = dict(env)
    try:
        facts = find(env)
    except RendezvousError:
        return
    finally:
        assert env == before
    assert 0 <= facts.rank < facts.world_size
    assert facts.local_rank is not None
    assert facts.master_addr
