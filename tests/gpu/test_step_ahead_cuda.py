"""The optimizer step that is queued before the norm is known: the same numbers, and overflows are still skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops.adam import FusedAdam

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def train(precision, *, ahead, poison=(), steps=6, monkeypatch):
    if not ahead:
        monkeypatch.setattr(FusedAdam, "takes_conditions", lambda self: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 8))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
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
