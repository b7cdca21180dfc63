"""Gradients that travel in another dtype than they have: how long their copies are there."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from benchmarks.allocations import Allocations
from benchmarks.quiet import quiet_group
from deepspeed.zero.gradients import replicated
from tests.harness import ranks

WIDTH, LAYERS = 256, 16
GRADIENTS = LAYERS * WIDTH * WIDTH * 2


def build(**config):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": 10**9,
        **config,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def step(engine, rank=0):
    inputs = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.bfloat16)
    loss = engine(inputs).float().square().mean()
    engine.backward(loss)
    return loss


@contextlib.contextmanager
def small_buckets():
    """One layer in each."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIRST_BYTES", "BUCKET_BYTES", "ALONE_BYTES"):
            patch.setattr(replicated, name, WIDTH * WIDTH * 2)
        yield patch


@ranks(1, init=False)
def test_copies_go_while_backward_runs():
    """In a backward of bf16 gradients that are summed as fp32, few are there as both, and few as fp32."""
    with small_buckets(), quiet_group(4, "cpu"), Allocations() as counted:
        engine = build(communication_data_type="fp32")
        for number in range(3):
            with counted.span(f"backward {number}"):
                step(engine)
            engine.step()
    peak = (counted.peak("backward 2") - counted.before("backward 2")) / GRADIENTS
    assert 1 <= peak < 1.5, peak
    engine.destroy()


@ranks(2)
def test_gradients_are_the_same_whenever_copies_are_let_go():
    """Also after a backward that failed."""

    def gradients(early):
        with small_buckets() as patch:
            if not early:
                patch.setattr(replicated.ReplicatedInFlight, "_finish_completed", lambda self: None)
            engine = build(communication_data_type="fp32")
            step(engine, dist.get_rank())  # gradients leave early once a backward has shown which come
            engine.step()
            handle = engine.module[3].register_full_backward_hook(_fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                step(engine, dist.get_rank())
            handle.remove()
            engine.zero_grad()
            found = []
            for _ in range(3):
                step(engine, dist.get_rank())
                found += [param.grad.clone() for param in engine.module.parameters()]
                engine.step()
            engine.destroy()
            return found

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, theirs)


def _fail(*_):
    raise RuntimeError("on purpose")
