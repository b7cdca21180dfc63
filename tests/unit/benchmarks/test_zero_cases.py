"""The cases of ZeRO: what they declare, how bytes are counted, and that FSDP2 does the work that PyTorch does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from benchmarks.case import Job, Setting, Target
from benchmarks.cases import discover, zero_memory, zero_stages
from benchmarks.states import live_bytes, zero_formula
from benchmarks.summary import applies
from benchmarks.training import GPT, SMALL, alternate, steps
from tests.harness import ranks

SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}


def targets(name: str, parameters: dict[str, object], ranks_: int) -> set[tuple[float, str | None]]:
    """Limits of a case's first judged measure that hold for a setting."""
    found = discover()[name]
    judged = next(measure for measure in found.measures if measure.targets)
    setting = Setting(ranks_, parameters)
    return {(target.limit, target.than) for target in judged.targets if applies(target, setting)}


def test_stages_are_compared_with_deepspeed_and_the_third_with_fsdp2_too():
    assert zero_stages.CASE.ranks == (2,)
    plain = [dict(given) for given in zero_stages.CASE.parameters if "offload" not in given]
    assert plain == [{"stage": 1}, {"stage": 2}, {"stage": 3}, SHARDED]
    theirs = (1.0, "deepspeed")
    assert targets("zero_stages", {"stage": 1}, 2) == {theirs}
    assert targets("zero_stages", SHARDED, 2) == {theirs, (1.0, "torch:fsdp2")}


def test_offloaded_states_are_compared_with_deepspeed():
    found = [dict(given) for given in zero_stages.CASE.parameters if "offload" in given]
    assert {given["offload"] for given in found} == {"cpu", "cpu+param", "nvme"}
    assert {given["stage"] for given in found if given["offload"] == "cpu"} == {1, 2, 3}
    assert all((1.0, "deepspeed") in targets("zero_stages", given, 2) for given in found)


@pytest.mark.parametrize(
    ("offload", "keys"),
    [
        ("cpu", {"offload_optimizer": {"device": "cpu"}}),
        ("cpu+param", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        ("nvme", {"offload_optimizer": {"device": "nvme", "nvme_path": "here"}}),
    ],
)
def test_what_an_offload_is_in_the_config(offload, keys):
    assert zero_stages.offloaded(offload, "here") == keys


@pytest.mark.parametrize("parameters", [{"stage": 2}, {"stage": 3, "offload": "cpu"}])
def test_fsdp2_takes_no_part_where_parameters_are_whole_or_states_elsewhere(parameters):
    job = Job("torch", "fsdp2", 0, 2, parameters, "")
    assert zero_stages.measure(job) == {}


def test_tiny_layers_has_a_limit_of_its_own_for_each_stage():
    assert targets("tiny_layers", {"stage": 0}, 2) == {(1.1, None), (1.0, "deepspeed")}
    assert targets("tiny_layers", SHARDED, 2) == {(1.5, None), (1.0, "deepspeed")}


def test_one_rank_and_memory_limits():
    assert discover()["zero_one_rank"].ranks == (1,)
    assert targets("zero_one_rank", {"stage": 3}, 1) == {(1.02, None)}
    assert zero_memory.CASE.ranks == (2,)
    assert [given["stage"] for given in zero_memory.CASE.parameters] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("target", "setting", "meant"),
    [
        (Target(1.0), Setting(4, {"stage": 3}), True),
        (Target(1.0, ranks=2), Setting(4), False),
        (Target(1.0, where={"stage": 3}), Setting(2, SHARDED), True),
        (Target(1.0, where={"stage": 3}), Setting(2, {"stage": 2}), False),
        (Target(1.0, where={"stage": 3}), Setting(2), False),
        (Target(1.0, ranks=2, where={"stage": 3}), Setting(1, SHARDED), False),
    ],
)
def test_which_settings_a_target_is_meant_for(target, setting, meant):
    assert applies(target, setting) is meant


def test_the_small_gpt_has_its_size():
    with torch.device("meta"):
        model = GPT(**SMALL)
    assert round(sum(param.numel() for param in model.parameters()) / 1e6) == 14


@pytest.mark.parametrize(("stage", "expected"), [(0, 1600), (1, 700), (2, 550), (3, 400)])
def test_formula_of_the_stages(stage, expected):
    """100 parameters on 4 ranks: 2 bytes of parameter, 2 of gradient, 12 of state."""
    assert zero_formula(stage, 100, 4) == expected
    assert zero_formula(stage, 100, 1) == 1600


def test_formula_without_gradients():
    assert zero_formula(0, 100, 4, gradient=0) == 1400
    assert zero_formula(3, 100, 4, gradient=0) == 350


def test_live_bytes_counts_storages_once_and_released_ones_not():
    before = live_bytes()
    whole = torch.zeros(1000)
    views = [whole[:10], whole.view(10, 100)]
    assert live_bytes() - before == 4000
    param = nn.Parameter(torch.zeros(500, dtype=torch.bfloat16))
    param.sum().backward()  # its gradient lives in C++ alone
    assert live_bytes() - before == 4000 + 2 * 1000
    whole.untyped_storage().resize_(0)
    assert live_bytes() - before == 2 * 1000
    del param, views
    assert live_bytes() == before


@ranks(2)
def test_fsdp2_does_the_same_work():
    torch.manual_seed(0)
    model = GPT(layers=2, width=16, heads=2, vocabulary=11, length=8)
    twin = copy.deepcopy(model)
    torch.manual_seed(1 + dist.get_rank())
    batch = (torch.randint(11, (2, 8)), torch.randint(11, (2, 8)))
    job = Job("torch", "fsdp2", dist.get_rank(), 2, SHARDED, "")
    alternate(*steps(job, model, twin, 2), batch, pairs=2, warm_up=0)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        # The gradient of a key's bias is zero but for rounding, which Adam enlarges to a visible step.
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-4, atol=1e-4)


@ranks(2)
@pytest.mark.parametrize("offload", ["cpu", "cpu+param"])
def test_an_engine_with_offloaded_states_does_the_same_work(offload):
    torch.manual_seed(0)
    model = GPT(layers=1, width=16, heads=2, vocabulary=11, length=8)
    twin = copy.deepcopy(model)
    torch.manual_seed(1 + dist.get_rank())
    batch = (torch.randint(11, (2, 8)), torch.randint(11, (2, 8)))
    zero = {"stage": 3, **zero_stages.offloaded(offload, "")}
    job = Job("ours", "", dist.get_rank(), 2, zero, "")
    alternate(*steps(job, model, twin, 2), batch, pairs=2, warm_up=0)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([mine]):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
