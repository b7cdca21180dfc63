"""What the comparison of two trainings takes for rounding, and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.closeness import Training, assert_same_training

LR, STEPS = 1e-2, 4


def train(dtype=torch.float32, *, noise=0.0, scale=1.0, skip=None, decay=0.1):
    """A small training by Adam; with noise of so many last bits in every weight and step, or with a mistake."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    masters = [param.detach().float() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=decay)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    losses, norms, data = [], [], torch.randn(STEPS, 8, 5)
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        loss = model(data[step].to(dtype)).float().square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float() * (scale if step else 1.0)
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(masters, 0.1).item())
        kept = [master.clone() for master in masters]
        optimizer.step()
        with torch.no_grad():
            if skip is not None and step == skip:
                masters[0].view(-1)[-1] = kept[0].view(-1)[-1]
            for param, master in zip(model.parameters(), masters, strict=True):
                moved = torch.rand(master.shape, generator=generator) - 0.5
                master.mul_(1 + 2 * moved * noise * torch.finfo(torch.float32).eps)
                param.copy_(master)
    after = {name: param.detach().clone() for name, param in model.named_parameters()}
    return Training(before, after, losses, norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_no_difference(dtype):
    assert_same_training(train(dtype, noise=2.0), train(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mistake", [{"scale": 1.05}, {"skip": 0}], ids=str)
def test_a_mistake_is_one(dtype, mistake):
    """A wrong mean, or one element that missed the first step."""
    with pytest.raises(AssertionError):
        assert_same_training(train(dtype, **mistake), train(dtype))


@pytest.mark.parametrize("mistake", [{"scale": 1.001}, {"skip": STEPS - 1}, {"decay": 0.0}, {"decay": 0.11}], ids=str)
def test_a_small_mistake_is_one_in_full_precision(mistake):
    """A thousandth of the gradient, which neither Adam nor clipping leaves in a weight, is seen in the norm."""
    with pytest.raises(AssertionError):
        assert_same_training(train(**mistake), train())


def test_other_names_and_idle_runs():
    good = train()
    with pytest.raises(AssertionError):
        assert_same_training(Training(good.before, {**good.after, "more": torch.ones(1)}), good)
    with pytest.raises(AssertionError, match="nothing was trained"):
        assert_same_training(good, Training(good.before, good.before))
