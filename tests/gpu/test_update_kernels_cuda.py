"""The kernels of the optimizers on a real GPU: beside their references, in engines, and with moments in 8 bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.ops.adam import ONE_PASS as ADAM
from deepspeed.ops.adam import AdamRule
from deepspeed.ops.lamb import ONE_PASS as LAMB
from deepspeed.ops.lamb import LambRule
from deepspeed.ops.lion import ONE_PASS as LION
from deepspeed.ops.lion import LionRule
from deepspeed.ops.muon import momentum
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.optimizer import ParameterBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]

SIZES = [(3, 5), (130,), (1,), (700, 1303), (256,)]
RULES = {
    "adam": (ADAM, AdamRule(1e-2, weight_decay=0.1, eps=1e-6)),
    "lion": (LION, LionRule(1e-2, weight_decay=0.1)),
    "lamb": (LAMB, LambRule(1e-2, weight_decay=0.1, eps=1e-6)),
}


@pytest.fixture(autouse=True)
def _world():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def numbers(size, dtype, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def batch(count, grad, moment, out):
    moments = tuple([numbers(size, moment, 5 + seed).abs() for size in SIZES] for seed in range(count))
    params, grads = ([numbers(size, dtype, seed) for size in SIZES] for seed, dtype in ((0, torch.float32), (1, grad)))
    outs = [] if out is None else [torch.zeros(size, dtype=out, device="cuda") for size in SIZES]
    return ParameterBatch(3, moments, params, grads, factor=0.5, outs=outs)


def given():
    return Conditions(torch.tensor(4.0, device="cuda"), torch.tensor(0.0, device="cuda"))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
def test_the_kernel_updates_as_the_reference_does(name, grad, moment):
    update, rule = RULES[name]
    mine = batch(len(update.rule.signed), grad, moment, torch.bfloat16)
    theirs = copy.deepcopy(mine)
    update.triton(mine, rule, given())
    update.reference(theirs, rule, given())
    for a, b in zip(mine.params, theirs.params, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 if moment == torch.float32 else 2e-3)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(mine.outs, mine.params, strict=True))


def test_the_momentum_of_muon():
    rule = momentum.MomentumRule(0.9, lr=0.1, keep=0.99)
    made = batch(1, torch.bfloat16, torch.float32, torch.bfloat16)
    mine = momentum.Momenta(made.params, made.grads, made.moments[0], list(made.outs), 0.5, given())
    theirs = copy.deepcopy(mine)
    ways = [[torch.zeros(size, device="cuda") for size in SIZES] for _ in range(2)]
    momentum.directions_triton(mine, rule, ways[0])
    momentum.directions_reference(theirs, rule, ways[1])
    updates = [numbers(size, torch.float32, 9) for size in SIZES]
    updates[1].fill_(float("nan"))
    momentum.apply_triton(mine, rule, updates)
    momentum.apply_reference(theirs, rule, updates)
    for a, b in zip([*ways[0], *mine.params, *mine.momenta], [*ways[1], *theirs.params, *theirs.momenta], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def train(kind, params, *, steps=60, fast=True, monkeypatch=None, **more):
    if not fast:
        for cls in ("adam.FusedAdam", "lion.FusedLion", "lamb.FusedLamb"):
            monkeypatch.setattr(f"deepspeed.ops.{cls}.takes_one_pass", lambda self, device: False)
        monkeypatch.setattr("deepspeed.ops.muon.momentum.takes_one_pass", lambda device: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 64))
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": kind, "params": params},
        **more,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(engine.device, torch.bfloat16)
    losses = []
    for _ in range(steps):
        loss = (engine(x).float() - x.float()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("kind", "params"),
    [("Lion", {"lr": 1e-3}), ("Lamb", {"lr": 1e-2}), ("Muon", {"lr": 1e-2}), ("AdamW", {"lr": 1e-3})],
)
def test_an_engine_trains_alike_with_and_without_kernels(kind, params, monkeypatch):
    fast = train(kind, params, steps=10)
    slow = train(kind, params, steps=10, fast=False, monkeypatch=monkeypatch)
    assert fast == pytest.approx(slow, rel=3e-2)


@pytest.mark.parametrize(("kind", "rate"), [("AdamW", 1e-3), ("Lion", 3e-4)])
def test_moments_in_eight_bits_learn_as_float32_does(kind, rate):
    narrow = train(kind, {"lr": rate, "moment_bits": 8})
    wide = train(kind, {"lr": rate})
    assert narrow[-1] < 0.5 * narrow[0]
    assert narrow[-1] == pytest.approx(wide[-1], rel=0.1, abs=2e-3)


def test_codes_are_rounded_as_the_reference_rounds_them():
    mine = batch(2, torch.bfloat16, torch.float32, torch.bfloat16)
    mine.moments = tuple(
        [torch.zeros(each.numel(), dtype=torch.uint8, device="cuda") for each in m] for m in mine.moments
    )
    mine.scales = tuple([torch.zeros(-(-each.numel() // 256), device="cuda") for each in m] for m in mine.moments)
    theirs = copy.deepcopy(mine)
    for step in (1, 2, 3):
        mine.step = theirs.step = step
        ADAM.triton(mine, AdamRule(1e-2), given())
        ADAM.reference(theirs, AdamRule(1e-2), given())
    pairs = list(zip(mine.moments, theirs.moments, strict=True))
    same = sum(int((a == b).sum()) for one, other in pairs for a, b in zip(one, other, strict=True))
    assert same > 0.98 * sum(each.numel() for moments in mine.moments for each in moments)
    for a, b in zip(mine.params, theirs.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "Lamb", "Muon"])
def test_the_optimizer_in_backward(kind, monkeypatch):
    monkeypatch.setattr("deepspeed.runtime.step.in_backward._TOGETHER", 1000)
    found = [
        train(kind, {"lr": 1e-3}, steps=8, gradient_clipping=0, optimizer_in_backward={"enabled": enabled})
        for enabled in (True, False)
    ]
    assert found[0] == pytest.approx(found[1], rel=3e-2)
