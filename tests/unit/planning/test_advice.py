"""Advice: what a plan proposes fits when it is planned again and when it is run, with as many samples a step."""

from __future__ import annotations

import random
from typing import Any

from deepspeed.planning.changes import Proposal, changed, proposals
from deepspeed.planning.planner import Cluster, plan_model
from deepspeed.planning.trace import PlannedModel, quiet
from tests.harness import ranks
from tests.unit.planning.planned import Decoder, config, example_batch, measured

CONFIGURATIONS, SEED, FIRST = 2, 38, 3
SLACK = 1.02  # how near the peak of a plan is to that of a run


def drawn(number: int) -> tuple[int, dict[str, Any], float]:
    """A world, a config, and the part of its memory that there is."""
    draw = random.Random(1000 * SEED + number)
    stage, world = draw.randrange(4), draw.choice((1, 2, 4, 8))
    values = config(stage, draw.choice((1, 2, 3)), train_micro_batch_size_per_gpu=draw.choice((1, 2, 4, 6)))
    values["bf16"]["enabled"] = draw.random() < 0.7
    if stage:
        values["zero_optimization"]["reduce_bucket_size"] = draw.choice((40_000, 500_000_000))
    if draw.random() < 0.3:
        values["zero_optimization"]["offload_optimizer"] = {
            "device": "cpu",
            "ratio": draw.choice((0.5, 1.0)) if stage == 3 else 1.0,
        }
    return world, values, draw.uniform(0.4, 0.95)


@ranks(1, init=False)
def test_what_is_proposed_fits():
    advised = 0
    for number in range(CONFIGURATIONS):
        world, values, part = drawn(number)
        model = PlannedModel(Decoder, quiet(values), lambda: example_batch)
        whole = plan_model(model, Cluster(world))
        memory = int(part * whole.peak)
        found = plan_model(model, Cluster(world, memory=memory))
        assert found.fits is False
        for each in proposals(model, found)[:FIRST]:
            check(each, model, found, memory)
            advised += 1
    assert advised >= CONFIGURATIONS, "most of these can be made to fit"


def check(each: Proposal, model: PlannedModel, found: Any, memory: int) -> None:
    text = each.change.text
    assert each.change.config != dict(model.config) or each.change.code, text
    again = plan_model(changed(model, each.change), found.cluster)
    assert again.peak == each.plan.peak <= memory, text
    ran = Decoder()
    if each.change.prepare is not None:
        each.change.prepare(ran)
    real = measured(ran, each.change.config, found.cluster.world)
    assert real.total <= memory * SLACK, (text, real)
    assert again.largest.batch[0] == found.largest.batch[0], text
