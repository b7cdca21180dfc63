"""Plans of pipelines: few micro batches tell what a rank holds and sends in a whole step."""

from __future__ import annotations

import pytest
import torch

from deepspeed.planning import plan
from deepspeed.planning import trace as tracing
from tests.harness import ranks
from tests.pipelines import LENGTH, VOCABULARY, pipeline

STAGES, MICRO = 2, 9


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


def products(found):
    return {(each.phase, each.name): each.count for each in found.work if each.name in ("mm", "addmm")}
