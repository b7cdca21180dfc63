"""The optimizer step that is queued before the norm is known: the same numbers, and overflows are still skipped."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.one_pass import Conditions
from tests.harness import ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _world():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(precision, *, ahead, poison=(), steps=6, monkeypatch):
    if not ahead:
        monkeypatch.setattr(FusedAdam, "takes_conditions", lambda self, device: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 8))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
            precision: {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})},
        },
    )
    generator = torch.Generator().manual_seed(1)
    losses, norms, applied = [], [], []
    for step in range(steps):
        x = torch.randn(4, 64, generator=generator).to(engine.device, next(model.parameters()).dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss * (float("inf") if step in poison else 1.0))
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
        applied.append(engine.was_step_applied())
    steps_taken = {state["step"] for state in engine.basic_optimizer.state.values()}
    params = [param.detach().clone() for param in engine.basic_optimizer.state]
    engine.destroy()
    return losses, norms, applied, steps_taken, params


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("poison", [(), (2, 3)])
def test_the_device_decides_as_the_host_would(precision, poison, monkeypatch):
    with monkeypatch.context() as patch:
        slow = train(precision, ahead=False, poison=poison, monkeypatch=patch)
    fast = train(precision, ahead=True, poison=poison, monkeypatch=monkeypatch)
    assert fast[2] == slow[2] == [step not in poison for step in range(6)]
    assert fast[3] == slow[3] == {6 - len(poison)}
    assert fast[0] == pytest.approx(slow[0], rel=1e-3)
    for mine, theirs in zip(fast[4], slow[4], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def strange():
    """What a rank may hold: a usual piece, narrow ones, one with gaps, an empty one, one in host memory."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((64, 9), (33,), (17,), (6, 4), (0,), (5,))]
    usual, narrow, half, gaps, empty, host = (value.to("cuda") for value in values)
    made = [usual, narrow.bfloat16(), half.half(), gaps.t(), empty, host.cpu()]
    return [nn.Parameter(value) for value in made]


def give(params, factor=1.0):
    for place, param in enumerate(params):
        param.grad = torch.full_like(param, 0.1 * (place + 1)) * factor


def conditions(divisor, skip):
    return Conditions(torch.tensor(divisor, device="cuda"), torch.tensor(skip, device="cuda"))


@pytest.mark.parametrize("wide", [False, True])
def test_whatever_is_held_can_be_updated_under_conditions(wide):
    mine, plain = strange(), strange()
    under, free = FusedAdam(mine, weight_decay=0.1), FusedAdam(plain, weight_decay=0.1)
    if wide:
        under.hold_states(torch.float32)
        free.hold_states(torch.float32)
    assert under.takes_conditions(torch.device("cuda", 0))
    for step in range(4):
        skip = step == 1
        give(mine, float("inf") if skip else 4.0)
        with under.under(conditions(float("nan") if skip else 4.0, float(skip))):
            under.step()
        if skip:
            under.take_back()
        else:
            give(plain)
            free.step()
    for left, right in zip(mine, plain, strict=True):
        torch.testing.assert_close(left, right)
        for name, value in free.state[right].items():
            torch.testing.assert_close(under.state[left][name], value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_a_rank_that_holds_nothing_skips_and_steps_with_the_others(stage):
    os.environ["LOCAL_RANK"] = "0"  # both on one device
    model = nn.Linear(1, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        },
    )
    applied = []
    for factor in (1.0, float("inf"), 1.0):
        loss = engine(torch.ones(1, 1, device=engine.device, dtype=torch.half)).float().sum()
        engine.backward(loss * factor)
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [True, False, True]
    assert {state["step"] for state in engine.basic_optimizer.state.values()} <= {2}
