"""The cases that time training steps: what they declare, how they compare, and that both sides do the same work."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from benchmarks.case import Job
from benchmarks.cases import discover
from benchmarks.training import GPT, alternate, median_ratio, steps
from tests.harness import ranks

LIMITS = {"engine_overhead": (1, 1.02), "data_parallel": (2, 1.0)}


@pytest.mark.parametrize(("name", "ranks_", "limit"), [(name, *value) for name, value in LIMITS.items()])
def test_declared_targets(name, ranks_, limit):
    case = discover()[name]
    assert case.ranks == (ranks_,)
    ratio = next(measure for measure in case.measures if measure.name == "ratio")
    assert {(target.limit, target.than) for target in ratio.targets} == {(limit, None), (1.0, "deepspeed")}


def test_a_disturbed_pair_does_not_move_the_ratio():
    assert median_ratio([1.1] * 20, [1.0] * 20) == pytest.approx(1.1)
    assert median_ratio([1.1] * 19 + [50.0], [1.0] * 20) == pytest.approx(1.1)
    # whoever goes second is faster: that cancels within two pairs
    assert median_ratio([1.0, 0.9] * 5, [0.9, 1.0] * 5) == pytest.approx(1.0)
    # an odd last pair has no partner
    assert median_ratio([1.0, 1.0, 9.0], [1.0, 1.0, 1.0]) == 1.0


def test_the_gpt_of_the_overhead_case_has_its_size():
    with torch.device("meta"):
        model = GPT(layers=12, width=768, heads=12, vocabulary=50257, length=1024)
    assert sum(param.numel() for param in model.parameters()) == 124_439_808


@pytest.mark.parametrize("contender", ["ours", "torch"])
@ranks(1, 2)
def test_both_sides_do_the_same_work(contender):
    torch.manual_seed(0)
    model = GPT(layers=2, width=16, heads=2, vocabulary=11, length=8)
    start, twin = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(1 + dist.get_rank())
    batch = (torch.randint(11, (2, 8)), torch.randint(11, (2, 8)))
    job = Job(contender, "", dist.get_rank(), dist.get_world_size(), {}, "")
    times = alternate(*steps(job, model, twin, 2), batch, pairs=3, warm_up=1)
    assert times.shape == (2, 3)
    assert bool((times > 0).all())
    for mine, theirs, before in zip(model.parameters(), twin.parameters(), start.parameters(), strict=True):
        assert not torch.equal(mine, before)
        # The gradient of a key's bias is zero but for rounding, which Adam enlarges to a visible step.
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_order_within_pairs_alternates(monkeypatch):
    monkeypatch.setattr(dist, "barrier", lambda: None)
    seen: list[str] = []
    alternate(lambda _: seen.append("c"), lambda _: seen.append("r"), (), pairs=4, warm_up=1)
    assert "".join(seen[2:]) == "rccrrccr"
