"""Plans of pipelines: few micro batches tell what a rank holds and sends in a whole step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepspeed.planning import DeviceCeilings, plan
from deepspeed.planning import trace as tracing
from deepspeed.planning.page import page
from tests.harness import ranks
from tests.pipelines import LENGTH, VOCABULARY, pipeline

STAGES, MICRO = 2, 9
HOST = DeviceCeilings("cpu", 1 << 40, 1e12, 1e12, 1e10, 1e9, 1e9, "this test", launch=1e-9)
RULES = [
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
]


def job(schedule):
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }
    return (lambda: pipeline(STAGES, schedule=schedule, partition_method="uniform", example_input=tokens)), config


def example_batch(batch, sequence=None):
    tokens = torch.randint(1, VOCABULARY, (batch, LENGTH))
    return tokens, tokens


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@ranks(1, init=False)
def test_few_micro_batches_stand_for_all(schedule):
    model, config = job(schedule)
    few = plan(model, config, world=8, inputs=example_batch)
    tracing._micro_steps = lambda engine, steps, plan: (steps, steps)
    every = plan(model, config, world=8, inputs=example_batch)
    for short, whole in zip(few.traces, every.traces, strict=True):
        assert abs(short.peak.total - whole.peak.total) <= 0.02 * whole.peak.total, (short.peak, whole.peak)
        assert products(short) == products(whole), (short.stage, short.batch)
        assert sent(short) == sent(whole), (short.stage, short.batch)
        assert all(each.phase != "step" for each in whole.collectives if each.op in ("isend", "irecv"))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@ranks(1, init=False)
def test_slices_of_layers_send_in_every_micro_batch(schedule):
    model, config = job(schedule)
    config["tensor_parallel"] = {"autotp_size": 2, "partition_config": {"layer_specs": RULES}}
    few = plan(model, config, world=8, inputs=example_batch)
    assert few.largest.axes["tp"] == 2
    tracing._micro_steps = lambda engine, steps, plan: (steps, steps)
    every = plan(model, config, world=8, inputs=example_batch)
    for short, whole in zip(few.traces, every.traces, strict=True):
        assert sent(short) == sent(whole), (short.stage, short.batch)
        assert sum(each.count for each in whole.collectives if each.axis == "tp") >= 2 * MICRO


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
@ranks(1, init=False)
def test_the_step_is_as_long_as_the_simulated_schedule(schedule):
    model, config = job(schedule)
    found = plan(model, config, world=8, inputs=example_batch, device=HOST)
    time, shown = found.time, found.to_json()["time"]
    timeline = time.timeline
    assert timeline.schedule == found.traces[0].schedule, "the one that the engine runs"
    assert len({round(shown, 9) for shown in shown["pipeline"]["busy"]}) == STAGES, "each stage has costs of its own"
    assert max(shown["pipeline"]["busy"]) < timeline.length < sum(shown["pipeline"]["busy"])
    assert shown["pipeline"]["bubble"] == timeline.bubble > 0
    assert 0 <= time.total - timeline.length - time.phases[-1].total < 1e-6, "the optimizer steps after all of it"
    assert time.bubble >= timeline.length - max(shown["pipeline"]["busy"])
    slow = replace(HOST, within=1e3)
    assert found.time.total < plan(model, config, world=8, inputs=example_batch, device=slow).time.total
    assert f"{MICRO} micro batches" in page(found)


def sent(found):
    return {(each.op, each.axis, each.size, each.phase): each.count for each in found.collectives}


def products(found):
    return {(each.phase, each.name): each.count for each in found.work if each.name in ("mm", "addmm")}
