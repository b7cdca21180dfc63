"""States and parameters that leave a GPU: the numbers of those that stay, and memory that is free meanwhile."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.models import batches, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _world():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
BOTH = {**OPTIMIZER, "offload_param": {"device": "cpu"}}


def train(zero, precision, accumulation=1, clip=0.3, steps=4):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        section["fp16"]["loss_scale"] = 64.0
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
        **section,
    }
    engine, *_ = deepspeed.initialize(model=make(), config=config)
    norms = []
    for place, batch in enumerate(batches(steps * accumulation, 12)):
        engine.backward(engine(*(part.cuda() for part in batch)))
        engine.step()
        if (place + 1) % accumulation == 0:
            norms.append(engine.get_global_grad_norm())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = [param.detach().float().clone() for param in engine.module.parameters()]
    engine.destroy()
    return weights, norms


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_numbers_as_on_the_device(precision, accumulation):
    weights, norms = train({"stage": 0}, precision, accumulation)
    tried = [{"stage": stage, **OPTIMIZER} for stage in (0, 1, 2, 3)]
    tried += [{"stage": 3, **BOTH}, {"stage": 3, "offload_param": {"device": "cpu"}}]
    tried += [{"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}]
    for zero in tried:
        mine, measured = train(zero, precision, accumulation)
        assert measured == pytest.approx(norms, rel=1e-4), zero
        for ours, theirs in zip(mine, weights, strict=True):
            tolerance = 1e-5 if precision == "fp32" else 2e-2
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)


class Tower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().square().mean()


def peak_of(zero, width=2048, depth=8, memory=None, **params):
    """Bytes per parameter at the peak of three steps."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **params}},
        "memory": memory or {},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": width * width, **zero},
    }
    torch.manual_seed(0)
    model = Tower(width, depth)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        engine.backward(engine(torch.randn(1, width, device="cuda", dtype=torch.bfloat16)))
        engine.step()
    peak = (torch.cuda.max_memory_allocated() - before) / (width * width * depth)
    engine.destroy()
    return peak


def test_the_device_holds_less(monkeypatch):
    # where the device has memory to spare it helps the host with tiles that it keeps: of so small a model, all
    monkeypatch.setattr("deepspeed.zero.states.host_step.can_stream", lambda *_: None)
    assert peak_of({"stage": 2}) > 14  # weights, gradients, masters, moments
    assert peak_of({"stage": 2, **OPTIMIZER}) < 8  # weights and a few buckets
    assert peak_of({"stage": 3, **BOTH}) < 4  # a few layers of eight


@pytest.mark.parametrize(("bits", "each"), [(32, 14), (8, 8)])
@pytest.mark.parametrize("stage", [2, 3])
def test_budgets_hold_at_the_peak(monkeypatch, stage, bits, each):
    monkeypatch.setattr("deepspeed.zero.states.host_step.can_stream", lambda *_: None)
    width, depth = 4096, 16
    budget = 2 + each / 2  # weights, and half of masters, moments and gradients
    peak = peak_of({"stage": stage}, width, depth, {"device": int(budget * width**2 * depth)}, moment_bits=bits)
    assert peak < budget + 1.2, f"{peak:.2f} bytes per parameter; planned were {budget:.2f}, beside a few buckets"


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("blocking", [False, True])
def test_states_that_leave_for_a_while_free_the_device(stage, blocking):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        engine, *_ = deepspeed.initialize(model=nn.Linear(2048, 2048), config=config)
        batch = torch.randn(4, 2048, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
        for _ in range(3):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
            if moves:
                before = torch.cuda.memory_allocated()
                engine.offload_states(non_blocking=not blocking)
                # two moments and a master of 4 bytes, a parameter of 2
                assert before - torch.cuda.memory_allocated() >= 14 * 2048 * 2048
                engine.reload_states(non_blocking=not blocking)
                assert torch.cuda.memory_allocated() <= before
        found.append([param.detach().clone() for param in engine.module.parameters()])
        engine.destroy()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
