"""Bytes of a parameter under a config, and what follows for the memory of hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config import load
from deepspeed.memory.budget import Spread, model_states
from deepspeed.preflight.check import Level
from deepspeed.preflight.checks.machine import (
    OffloadCheck,
    OffloadFact,
    available_memory,
    container_room,
    needs_of,
    widths_of,
)
from deepspeed.preflight.checks.plan import PlanCheck, PlanFact
from tests.unit.preflight.jobs import good, job, only

GB = 10**9
MODEL = 10_000_000


def schema(stage=0, *, optimizer="AdamW", bf16=True, steps=1, params=None, tensor_parallel=None, **zero):
    return load(
        {
            "tensor_parallel": tensor_parallel,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": steps,
            "bf16": {"enabled": bf16},
            "optimizer": {"type": optimizer, "params": {"lr": 0.1, **(params or {})}},
            "zero_optimization": {"stage": stage, **zero},
        }
    ).schema


@given(st.sampled_from((0, 1, 2, 3)), st.sampled_from((1, 2, 8, 64)), st.booleans())
def test_without_offload_it_is_what_the_exact_arithmetic_says(stage, world, bf16):
    made = schema(stage, bf16=bf16)
    exact = model_states([[MODEL]], Spread(stage, world), widths=widths_of(made))
    found = needs_of(made, world)
    assert found.device * MODEL == pytest.approx(exact.total, rel=1e-4)
    assert found.host == found.disk == 0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_layers_that_ranks_share_are_divided_at_every_stage(stage):
    alone, shared = needs_of(schema(stage), 2), needs_of(schema(stage, tensor_parallel={"autotp_size": 4}), 8)
    assert shared.device == pytest.approx(alone.device / 4)


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_of_mics_are_those_of_a_smaller_world(stage):
    assert needs_of(schema(stage, mics_shard_size=4), 16) == needs_of(schema(stage), 4)


@pytest.mark.parametrize(
    ("optimizer", "params", "width"),
    [
        ("AdamW", {}, 8),
        ("Lion", {}, 4),
        ("Adagrad", {}, 4),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 4),
        ("AdamW", {"moment_bits": 8}, 2),
    ],
)
def test_moments_of_an_optimizer(optimizer, params, width):
    offload = {"offload_optimizer": {"device": "cpu"}} if "moment_bits" in params else {}
    assert widths_of(schema(0, optimizer=optimizer, params=params, **offload)).optimizer == width


@given(st.sampled_from((0, 1, 2, 3)), st.sampled_from((1, 4, 32)), st.sampled_from((1, 4)))
def test_offloaded_states_leave_the_device_and_nothing_is_lost(stage, world, steps):
    here = needs_of(schema(stage, steps=steps), world)
    away = needs_of(schema(stage, steps=steps, offload_optimizer={"device": "cpu"}), world)
    share = 1 if stage == 0 else 1 / world
    assert away.host == pytest.approx((4 + 8 + 2) * share)  # masters, moments, gradients
    assert away.device < here.device
    assert away.disk == 0
    disk = needs_of(schema(3, steps=steps, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}), world)
    assert disk.disk == pytest.approx(12 / world)
    assert disk.host == pytest.approx(2 / world)


def test_parameters_leave_too():
    found = needs_of(schema(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}), 4)
    assert (found.device, found.host) == (0, pytest.approx(16 / 4))
    found = needs_of(schema(3, offload_param={"device": "nvme", "nvme_path": "/tmp"}), 4)
    assert found.disk == pytest.approx(2 / 4)


def fact(rank, **changed):
    return replace(OffloadFact(0.5, 1.75, 0.0, 80 * GB, 1000 * GB), **changed)


def test_without_a_model_the_most_parameters_are_told():
    finding = only(OffloadCheck().judge(job(fact, 16)))
    assert finding.level is Level.OK
    assert "0.5 B on its device, 1.75 B of its host's memory; at most 71.4B parameters fit" in finding.what


@pytest.mark.parametrize(("params", "level"), [(10 * GB, Level.OK), (60 * GB, Level.WARNING), (80 * GB, Level.PROBLEM)])
def test_a_model_against_the_memory_of_a_host(params, level):
    found = OffloadCheck().judge(job(lambda rank: fact(rank, params=params), 16))
    assert {finding.level for finding in found} == {level}
    if level is not Level.OK:
        assert found[0].ranks == tuple(range(8))
        assert "host h0: the plan puts" in found[0].what
        assert len(found) == 2


def test_a_model_against_a_device_and_a_disk():
    finding = only(OffloadCheck().judge(job(lambda rank: fact(rank, host=0.0, device=16.0, params=7 * GB), 8)))
    assert (finding.level, finding.ranks) == (Level.PROBLEM, tuple(range(8)))
    assert "model states take 112.00 GB of a device that has 80.00 GB free" in finding.what
    finding = only(
        OffloadCheck().judge(job(lambda rank: fact(rank, host=0.0, disk=2.0, disk_free=100 * GB, params=7 * GB), 8))
    )
    assert "into its disk, of which 100.00 GB are free" in finding.what


def test_a_swap_folder_that_cannot_be_used_and_no_config():
    finding = only(OffloadCheck().judge(job(fact, 8, {0: fact(0, disk_path="/nvme", disk_error="read-only")})))
    assert (finding.level, finding.ranks) == (Level.PROBLEM, (0,))
    assert good(OffloadCheck().judge(job(lambda rank: OffloadFact(), 8)))


def test_the_limit_of_a_container_counts(tmp_path):
    own = tmp_path / "own"
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    assert container_room(tree, own) is None
    own.write_text("0::/a/b\n")
    assert container_room(tree, own) is None
    (tree / "a" / "memory.max").write_text("1000\n")
    (tree / "a" / "memory.current").write_text("400\n")
    (tree / "a" / "b" / "memory.max").write_text("max\n")
    (tree / "a" / "b" / "memory.current").write_text("300\n")
    assert container_room(tree, own) == 600
    (tree / "memory.max").write_text("500\n")
    (tree / "memory.current").write_text("500\n")
    assert container_room(tree, own) == 0
    own.write_text("0::/../../elsewhere\n")
    assert container_room(tree, own) == 0


def test_version_one_of_control_groups(tmp_path):
    own = tmp_path / "own"
    own.write_text("12:cpu:/x\n7:memory:/job\n")
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("2000")
    (group / "memory.usage_in_bytes").write_text("500")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("900")
    assert container_room(tmp_path, own) == 1500


def test_this_machine_has_memory():
    assert available_memory() > 0


PLAN = {
    "memory": {"peak": 10 * GB, "phase": "backward", "module": "head", "host": {"masters": GB}},
    "proposals": [{"change": f"change {number}"} for number in range(5)],
}


def test_a_plan_is_held_against_what_every_rank_has_free():
    def fact(rank, device=12 * GB, host=100 * GB, **more):
        return PlanFact(device, host, PLAN if rank == 0 else None, **more)

    assert good(PlanCheck().judge(job(fact, 8)))
    few = only(PlanCheck().judge(job(fact, 16, {3: fact(3, 9 * GB), 9: fact(9, 8 * GB)})))
    assert (few.level, few.ranks) == (Level.PROBLEM, (3, 9))
    assert "10.00 GB at its peak, in backward of head; as little as 8.00 GB is free" in few.what
    assert few.advice == "what fits: change 0; or change 1; or change 2"
    host = only(PlanCheck().judge(job(lambda rank: fact(rank, host=7 * GB), 8)))
    assert "host h0: its ranks need 8.00 GB" in host.what, "what is offloaded"
    cores = only(PlanCheck().judge(job(lambda rank: fact(rank, None, 80 * GB), 8)))
    assert "need 88.00 GB" in cores.what, "ranks on cores compute in the same memory"


def test_without_a_plan_it_is_told_why():
    assert good(PlanCheck().judge(job(lambda rank: PlanFact(), 8)))
    told = only(PlanCheck().judge(job(lambda rank: PlanFact(1, 1, None, "no such model" if rank == 0 else ""), 8)))
    assert (told.level, told.ranks) == (Level.WARNING, (0,))
    assert "no such model" in told.what
