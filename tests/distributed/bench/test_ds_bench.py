"""ds_bench on ranks: every operation moves what it says, and the program runs under the launcher."""

from __future__ import annotations

import json

import pytest
import torch

from deepspeed import comm
from deepspeed.bench import ds_bench
from deepspeed.bench.operations import OPERATIONS, BenchSetting, Sample, sweep
from deepspeed.comm.codec import codec_of
from tests.distributed.launcher.launched import Launched
from tests.harness import ranks


def room(group=None, dtype=torch.float32, **options):
    return BenchSetting(group, comm.get_world_size(group), comm.get_rank(group), dtype, torch.device("cpu"), **options)


class Written(BenchSetting):
    """A room whose tensors hold the rank's number, so that what an operation moved can be seen."""

    def tensor(self, elements):
        made = torch.full((elements,), float(self.rank + 1))
        TENSORS.append(made)
        return made


TENSORS: list[torch.Tensor] = []


@ranks(2, 3)
def test_every_operation_moves_what_it_says():
    world, rank = comm.get_world_size(), comm.get_rank()
    here = Written(None, world, rank, torch.float32, torch.device("cpu"))
    everybody = [float(number + 1) for number in range(world)]
    expected = {
        "all_reduce": [[sum(everybody)] * world],
        "all_gather": [everybody, [float(rank + 1)]],
        "reduce_scatter": [[sum(everybody)], [float(rank + 1)] * world],
        "all_to_all": [everybody, [float(rank + 1)] * world],
        "broadcast": [[1.0] * world],
        "reduce": [[sum(everybody)] * world] if rank == 0 else None,
        "pt2pt": [[float((rank & ~1) + 1)] * world] if rank ^ 1 < world else [],
    }
    assert set(expected) == set(OPERATIONS)
    for name, operation in OPERATIONS.items():
        TENSORS.clear()
        work = operation.prepare(here, world)()
        if work is not None:
            work.wait()
        if expected[name] is not None:  # what the others hold after a reduce is nobody's business
            assert [tensor.tolist() for tensor in TENSORS] == expected[name], name


@ranks(2)
def test_codes_move_what_tensors_do():
    world, rank = comm.get_world_size(), comm.get_rank()
    codec = codec_of("int8")
    here = Written(None, world, rank, torch.float32, torch.device("cpu"), codec=codec)
    expected = {"all_reduce": [1.0, 2.0], "all_gather": [1.0, 2.0], "reduce_scatter": [3.0], "all_to_all": [1.0, 2.0]}
    assert set(expected) == {name for name, operation in OPERATIONS.items() if operation.coded is not None}
    for name, values in expected.items():
        TENSORS.clear()
        sent = []
        with comm.dispatcher.events.subscribe(comm.CollectiveFinished, sent.append):
            OPERATIONS[name].coded(here, 1000 * world)()
        each = torch.tensor(values).repeat_interleave(1000)
        torch.testing.assert_close(TENSORS[-1].view(-1), each, rtol=1e-5, atol=0)
        rows = {"all_reduce": [2, 1], "all_gather": [1], "reduce_scatter": [2], "all_to_all": [2]}[name]
        assert [event.bytes for event in sent] == [count * codec.nbytes(1000) for count in rows]
    found = list(sweep(["all_reduce"], [64], room(codec=codec_of("sign")), trials=1, warmups=1))
    assert [type(each) for each in found] == [Sample]


@ranks(3)
def test_a_sweep_has_every_size_of_every_operation():
    names = list(OPERATIONS)
    found = list(sweep(names, [1, 1000], room(), trials=2, warmups=1))
    assert [(each.operation, each.nbytes) for each in found] == [(name, size) for name in names for size in (12, 1008)]
    times = [[each.seconds for each in found]]
    comm.broadcast_object_list(times, 0)
    assert times[0] == [each.seconds for each in found]  # the slowest rank's, on all
    for each in found:
        assert each.algorithm == each.nbytes / each.seconds
        assert each.bus == each.algorithm * OPERATIONS[each.operation].bus(3)


@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(2)
def test_the_functions_of_torch_may_be_measured(asynchronous):
    found = list(
        sweep(["all_reduce"], [64], room(module=torch.distributed, asynchronous=asynchronous), trials=1, warmups=1)
    )
    assert [type(each) for each in found] == [Sample]


@ranks(2)
def test_what_the_backend_does_not_have_is_told():
    found = list(sweep(["all_reduce", "all_gather"], [64], room(dtype=torch.int16), trials=1, warmups=1))
    assert [name for name, _ in found] == ["all_reduce", "all_gather"]
    assert all("Invalid scalar type" in why for _, why in found)


@ranks(1, init=False)
def test_the_program_starts_its_ranks(tmp_path):
    words = ["--num_gpus", "2", "--max-size", "4K", "--trials", "2", "--warmups", "2", "--broadcast", "--pt2pt"]
    with Launched([*words, "--json", "--log_level", "error"], tmp_path, main=ds_bench.main) as job:
        assert job.wait(120) == 0, job.errors()
    told = json.loads(job.output())
    assert told["setting"] == {
        "ranks": 2,
        "hosts": 1,
        "backend": "gloo",
        "device": "cpu",
        "dtype": "float32",
        "trials": 2,
        "codec": None,
    }
    assert [(each["operation"], each["nbytes"]) for each in told["results"]] == [
        ("broadcast", 1024),
        ("broadcast", 4096),
        ("pt2pt", 1024),
        ("pt2pt", 4096),
    ]


@ranks(1, init=False)
def test_one_rank_has_nobody_to_send_to(tmp_path):
    with Launched(["--num_gpus", "1"], tmp_path, main=ds_bench.main) as job:
        assert job.wait(120) == 2
    assert "there is one rank, which has nobody to send to" in job.errors()
