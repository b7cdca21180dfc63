"""Rank 0 of many: collectives that are counted and cost a copy, peaks to the byte, contenders on a tiny model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import __main__ as command
from benchmarks.agreements import ROUND_S, agreements, waiting_s
from benchmarks.allocations import Allocations
from benchmarks.case import Job
from benchmarks.cases import scale
from benchmarks.quiet import KINDS, quiet_group
from benchmarks.rank_zero import SHAPE, measure_rank
from benchmarks.training import GPT, decayed_optimizer
from tests.harness import ranks

TINY = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 11, "length": 8}
MIB = 2**20


def test_every_stage_at_every_size():
    assert {given["world"] for given in scale.CASE.parameters} == {8, 64, 1024, 16384}
    assert {given["stage"] for given in scale.CASE.parameters} == {1, 2, 3}
    assert {kind.partition(" ")[0] for kind in KINDS} == set(scale.KINDS)
    assert scale.measure(Job("torch", "fsdp2", 0, 1, {"world": 8, "stage": 2}, "")) == {}


def test_settings_can_be_chosen():
    wanted = [("world", frozenset({"8", "64"})), ("stage", frozenset({"3"}))]
    kept = command.narrowed(scale.CASE, wanted).parameters
    assert {(given["world"], given["stage"]) for given in kept} == {(8, 3), (64, 3)}
    assert command.narrowed(scale.CASE, []) == scale.CASE
    assert command.narrowed(scale.CASE, [("color", frozenset({"red"}))]).parameters == ()
    with pytest.raises(SystemExit):
        command.main(["scale", "--where", "world=3"])


def test_a_bucket_is_a_block():
    (bucket,) = {given["bucket"] for given in scale.CASE.parameters if "bucket" in given}
    assert sum(param.numel() for param in GPT(**SHAPE).blocks[0].parameters()) == bucket


def test_norms_and_biases_do_not_decay():
    decaying, exempt = decayed_optimizer(GPT(**TINY)).param_groups
    assert (decaying["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert {param.dim() for param in decaying["params"]} == {2}
    assert {param.dim() for param in exempt["params"]} == {1}


@ranks(1, init=False)
def test_a_gather_repeats_this_ranks_part_and_is_counted():
    with quiet_group(64) as traffic:
        part, whole = torch.arange(4.0), torch.full((256,), torch.nan)
        dist.all_gather_into_tensor(whole, part)
        assert torch.equal(whole.view(64, 4), part.expand(64, 4))
        assert (traffic.calls["all-gather"], traffic.sent["all-gather"]) == (1, 63 * 16)
        whole[:4] = 7.0  # in place, as stages 1 and 2 do
        work = dist.all_gather_into_tensor(whole, whole[:4], async_op=True)
        work.wait()
        assert bool((whole == 7.0).all())
        out = torch.empty(4)
        dist.reduce_scatter_tensor(out, whole)
        assert torch.equal(out, whole[:4])
        assert traffic.sent["reduce-scatter"] == 63 * 16
        assert traffic.seconds > 0
        traffic.clear()
        assert (traffic.calls.total(), traffic.sent.total(), traffic.seconds) == (0, 0, 0.0)


@ranks(1, init=False)
def test_other_operations_are_told_apart_and_groups_have_their_own_size():
    with quiet_group(64) as traffic:
        value = torch.ones(16)
        dist.all_reduce(value)
        assert (value[0].item(), traffic.sent["all-reduce"]) == (1.0, 2 * 64 * 63 // 64)
        few = dist.new_group([0, 1])
        traffic.clear()
        dist.all_reduce(value, group=few)
        dist.reduce(value, 0, group=few)
        dist.broadcast(value, 0)
        dist.barrier()
        assert traffic.calls == {"all-reduce": 1, "reduce": 1, "other": 2}
        assert traffic.sent == {"all-reduce": 64, "reduce": 64, "other": 64}
        told: list[object] = [None] * 64
        dist.all_gather_object(told, {"rank": 0})
        assert told == [{"rank": 0}] * 64


@ranks(1, init=False)
def test_torchs_own_collectives_are_back_afterwards():
    with quiet_group(8) as traffic:
        dist.all_reduce(torch.ones(1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    assert traffic.calls.total() == 1


@ranks(1, init=False)
def test_peaks_are_exact():
    with Allocations() as allocations:
        kept = torch.zeros(1000)
        with allocations.span("a"):
            for _ in range(3):
                temporary = torch.zeros(500, dtype=torch.float64)
                del temporary
        with allocations.span("b"):
            kept.untyped_storage().resize_(0)
            later = torch.zeros(200)
        with allocations.span("c"):
            pass
    assert later.numel() == 200
    assert (allocations.before("a"), allocations.peak("a")) == (4000, 8000)
    assert (allocations.before("b"), allocations.peak("b")) == (4000, 4000)
    assert (allocations.before("c"), allocations.peak("c")) == (800, 800)


@ranks(1, init=False)
def test_what_the_graph_holds_counts():
    with Allocations() as allocations:
        layer = nn.Linear(64, 64, bias=False)
        with allocations.span("forward"):
            loss = layer(torch.ones(8, 64)).tanh().sum()
        with allocations.span("backward"):
            loss.backward()
    states = allocations.before("backward") - allocations.before("forward")
    assert states == 8 * 64 * 4 * 2 + 4  # the input, what tanh keeps, the loss


def test_agreements_are_rounds_of_messages(monkeypatch):
    from deepspeed.comm.agreement import rounds

    assert waiting_s(0, 16384) == 0.0
    assert waiting_s(5, 16384) == pytest.approx(5 * rounds(16384) * ROUND_S)
    monkeypatch.delitem(__import__("sys").modules, "deepspeed.zero.agreement", raising=False)
    assert agreements() == 0


@pytest.mark.parametrize(
    ("contender", "flavour", "zero"),
    [
        ("ours", "", {"stage": 1}),
        ("ours", "", {"stage": 2}),
        ("ours", "", {"stage": 3, "persistent": 0, "bucket": 3280}),
        ("torch", "fsdp2", {"stage": 3}),
    ],
)
@ranks(1, init=False)
def test_a_contender_is_measured(contender, flavour, zero):
    job = Job(contender, flavour, 0, 1, {"world": 64, **zero}, "")
    found = measure_rank(job, TINY, most=2)
    assert set(found) <= {measure.name for measure in scale.CASE.measures}
    assert found["all-gather calls"] > 0
    assert found["peak_mib"] >= found["kept_mib"] > 0
    assert found["backward_mib"] > 0
    count = sum(param.numel() for param in GPT(**TINY).parameters())
    # a rank sends whatever it does not hold at least once; padding is no more than an element per rank and tensor
    once = count * 4 * 63 / 64 / MIB
    assert found["all-gather mib"] >= once
    assert ("agreements" in found) == (contender == "ours")
