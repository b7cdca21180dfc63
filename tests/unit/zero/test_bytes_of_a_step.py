"""What a step sends between nodes and within them: rank 0 of 8 nodes with 8 ranks each, pretended, against formulas."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import deepspeed
from deepspeed import comm
from deepspeed.comm import CollectiveFinished
from deepspeed.comm.compressed import SignErrors, sign_mean
from deepspeed.zero.parameters.shard import shard_of
from tests.harness import ranks

NODES, LOCAL = 8, 8
WORLD = NODES * LOCAL
WIDTH, LAYERS = 512, 3
PSI = WIDTH * WIDTH * LAYERS
QWZ = {"zero_quantized_weights": True}
HPZ = QWZ | {"zero_hpz_partition_size": LOCAL}
QGZ = HPZ | {"zero_quantized_gradients": True}


def start():
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL)  # of this process, which ends with the test
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())


def bytes_of_step(passes=1, **zero):
    """Bytes by link class and codec that rank 0 sends in one step, and the engine."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": passes,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    engine = deepspeed.initialize(model=model, config=config)[0]
    found = defaultdict(lambda: [0.0, 0.0])
    values = torch.randn(1, WIDTH, dtype=torch.bfloat16)
    for _ in range(2):  # the first step makes what later ones find
        found.clear()
        with comm.dispatcher.events.subscribe(CollectiveFinished, lambda event: count(found, event)):
            for _ in range(passes):
                engine.backward(engine(values).float().square().mean())
                engine.step()
    return dict(found), engine


def count(found, event):
    if event.bytes > 4096:  # what hosts tell each other, and the norm, is no payload
        for place, value in enumerate(event.links):
            found[event.codec or "plain"][place] += value


def into_node(found):
    return LOCAL * sum(between for _, between in found.values())


@ranks(1, init=False)
def test_stage_3_and_its_codecs():
    """6Ψ, 4Ψ, 3Ψ, 1.5Ψ: into a node from outside, of what it lacks of the whole."""
    start()
    outside, across = (WORLD - 1) / WORLD, (NODES - 1) / NODES
    scales = 1.02
    plain, _ = bytes_of_step()
    assert set(plain) == {"plain"}
    assert into_node(plain) == pytest.approx(6 * PSI * outside, rel=1e-3)
    qwz, _ = bytes_of_step(**QWZ)
    assert set(qwz) == {"plain", "int8"}
    assert 4 * PSI * outside <= into_node(qwz) <= 4 * PSI * outside * scales
    hpz, engine = bytes_of_step(**HPZ)
    assert 3 * PSI * outside <= into_node(hpz) <= 3 * PSI * outside * scales
    engine(torch.randn(1, WIDTH, dtype=torch.bfloat16))
    assert shard_of(engine.module[0].weight).near.copies.nbytes == 2 * PSI / LOCAL
    qgz, _ = bytes_of_step(**QGZ)
    assert set(qgz) == {"plain", "int8", "int4"}  # the nearer copies travel plain
    formula = PSI * outside + PSI / 2 * across
    assert formula <= into_node(qgz) <= formula * scales
    within, between = qgz["int4"]
    assert PSI / 2 * (LOCAL - 1) / LOCAL <= within <= PSI / 2 * (LOCAL - 1) / LOCAL * scales
    assert PSI / (2 * LOCAL) * across <= between <= PSI / (2 * LOCAL) * across * scales


@ranks(1, init=False)
def test_other_ways():
    start()
    across = (NODES - 1) / NODES
    for stage in (1, 2, 3):
        found, engine = bytes_of_step(stage=stage, mics_shard_size=LOCAL, passes=2)
        assert found["plain"][1] == pytest.approx(4 * PSI / LOCAL * across, rel=1e-3), stage
        engine.destroy()
    numel = 1 << 16
    seen = []
    value = torch.randn(numel)
    with comm.dispatcher.events.subscribe(CollectiveFinished, seen.append):
        sign_mean([value], [SignErrors.zero(value, WORLD)])
    assert {event.codec for event in seen} == {"sign"}
    sent = sum(event.links.total for event in seen)
    assert sent == pytest.approx(numel / 4 * (WORLD - 1) / WORLD + 8 * (WORLD - 1))
