"""LAMB: every implementation against the reference, the class against the formula, coefficients and clipping."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch

from deepspeed.ops.lamb import FusedLamb, LambRule, lamb_reference
from deepspeed.ops.registry import operations

WAYS = [
    pytest.param(each.load(), id=each.name)
    for each in operations()["lamb"].implementations
    if each.requires.holds and each.name != "reference"
]
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float16, torch.float16, torch.float32),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-12}
SHAPES = [(), (7,), (3, 5), (1000,)]
RULES = [
    LambRule(lr=1e-2),
    LambRule(lr=1e-2, weight_decay=0.1, bias_correction=False),
    LambRule(lr=1e-2, beta1=0.5, beta2=0.9, eps=1e-3, eps_inside_sqrt=True, weight_decay=0.1, scale=8.0),
    LambRule(lr=1e-2, max_coeff=1.1, min_coeff=0.9, scale=torch.tensor(2.0)),
]


def tensors(dtype, seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x).removeprefix("torch.") for x in d))
@pytest.mark.parametrize("kernel", WAYS)
def test_every_implementation_does_as_the_reference(kernel, dtypes, rule, monkeypatch):
    monkeypatch.setattr("deepspeed.ops.optimizer.WIDE_ELEMENTS", 100)
    mine = [tensors(dtypes[0], 0), tensors(dtypes[2], 1), [t.abs() for t in tensors(dtypes[2], 2)]]
    for step in range(1, 5):
        theirs = [[t.clone() for t in part] for part in mine]
        ratios = []
        for run, (p, m, v) in ((kernel, mine), (lamb_reference, theirs)):
            ratios.append(run(p, tensors(dtypes[1], 10 + step), m, v, step, rule))
        torch.testing.assert_close(torch.stack(ratios[0]), torch.stack(ratios[1]), rtol=1e-5, atol=1e-6)
        for left, right in zip(chain(*mine), chain(*theirs), strict=True):
            assert left.dtype == right.dtype
            bound = TOLERANCE[left.dtype]
            torch.testing.assert_close(left, right, rtol=bound, atol=bound)


def by_hand(p, grads, *, lr, betas, eps, decay, inside, correct, bounds):
    """The formula, in float64 numbers; returns the parameter and the last coefficient."""
    m, v, ratio = torch.zeros_like(p), torch.zeros_like(p), 1.0
    for t, g in enumerate(grads, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = m / (torch.sqrt(v + eps) if inside else torch.sqrt(v) + eps) + decay * p
        w, n = p.norm().item(), u.norm().item()
        ratio = min(max(w / n, bounds[0]), bounds[1]) if w and n else 1.0
        rate = lr * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) if correct else lr
        p = p - rate * ratio * u
    return p, ratio


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("bounds", [(0.01, 10.0), (2.0, 3.0)])
def test_formula(inside, correct, bounds):
    shapes = [(30,), (4, 4)]
    params = [torch.nn.Parameter(t) for t in tensors(torch.float64, 3, shapes)]
    start = [p.detach().clone() for p in params]
    grads = [tensors(torch.float64, 40 + step, shapes) for step in range(4)]
    optimizer = FusedLamb(
        params,
        lr=0.02,
        betas=(0.8, 0.9),
        eps=1e-3,
        eps_inside_sqrt=inside,
        weight_decay=0.1,
        bias_correction=correct,
        min_coeff=bounds[0],
        max_coeff=bounds[1],
    )
    for each in grads:
        for param, grad in zip(params, each, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    for place, param in enumerate(params):
        expected, ratio = by_hand(
            start[place],
            [g[place] for g in grads],
            lr=0.02,
            betas=(0.8, 0.9),
            eps=1e-3,
            decay=0.1,
            inside=inside,
            correct=correct,
            bounds=bounds,
        )
        torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=1e-12)
        assert optimizer.get_lamb_coeffs()[place] == pytest.approx(ratio, rel=1e-12)
    assert list(optimizer.state[params[0]]) == ["step", "exp_avg", "exp_avg_sq"]


def test_coefficients_of_the_last_step_in_the_order_of_the_parameters():
    params = [torch.nn.Parameter(torch.full((4,), value)) for value in (0.0, 1.0, 0.001, 100.0)]
    params[1] = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = FusedLamb([{"params": params[:2]}, {"params": params[2:]}])
    assert optimizer.get_lamb_coeffs() == []
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    # first step: every element of the update is √(1−β1)²/… = 0.1/√0.001 ≈ 3.162
    update = 0.1 / math.sqrt(0.001)
    assert optimizer.get_lamb_coeffs() == pytest.approx([1.0, 1 / update, 0.01, 10.0], rel=1e-3)


def test_scale_divides_the_gradients():
    pair = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    for param, factor in zip(pair, (1.0, 128.0), strict=True):
        param.grad = torch.arange(1.0, 5.0) * factor
        FusedLamb([param], eps=0.5).step(scale=factor)
    assert torch.equal(pair[0], pair[1])
    with pytest.raises(ValueError, match="scale is 0"):
        FusedLamb(pair).step(scale=0)


@pytest.mark.parametrize("limit", [1.0, 1000.0])
def test_max_grad_norm_clips_the_group(limit):
    grads = [torch.full((9,), 2.0), torch.full((16,), 3.0)]
    norm = math.sqrt(9 * 4 + 16 * 9)
    clipped, plain = ([torch.nn.Parameter(torch.ones_like(g)) for g in grads] for _ in range(2))
    for a, b, g in zip(clipped, plain, grads, strict=True):
        a.grad, b.grad = g.clone() * 4, g.clone() / max(1.0, norm / limit)
    FusedLamb(clipped, eps=0.5, max_grad_norm=limit).step(scale=4.0)
    FusedLamb(plain, eps=0.5).step()
    for a, b in zip(clipped, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_bounds():
    with pytest.raises(ValueError, match="min_coeff 2 is above max_coeff 1"):
        FusedLamb([torch.nn.Parameter(torch.ones(1))], max_coeff=1, min_coeff=2)
