"""Adagrad: every implementation against the reference, the class against torch.optim.Adagrad."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adagrad.rule import AdagradRule, adagrad_reference
from deepspeed.ops.registry import operations

WAYS = [
    pytest.param(each.load(), id=each.name)
    for each in operations()["adagrad"].implementations
    if each.requires.holds and each.name != "reference"
]
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float16, torch.float16, torch.float32),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-13}
SHAPES = [(), (7,), (3, 5), (1000,), (0,)]


def tensors(dtype, seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x).removeprefix("torch.") for x in d))
@pytest.mark.parametrize("kernel", WAYS)
def test_every_implementation_does_as_the_reference(kernel, dtypes, decay):
    rule = AdagradRule(lr=0.1, weight_decay=decay)
    mine = [tensors(dtypes[0], 0), [t.abs() for t in tensors(dtypes[2], 1)]]
    for step in range(4):
        theirs = [[t.clone() for t in part] for part in mine]
        for run, (p, v) in ((kernel, mine), (adagrad_reference, theirs)):
            run(p, tensors(dtypes[1], 10 + step), v, rule)
        for left, right in zip(chain(*mine), chain(*theirs), strict=True):
            assert left.dtype == right.dtype
            bound = TOLERANCE[left.dtype]
            torch.testing.assert_close(left, right, rtol=bound, atol=bound)


@pytest.mark.parametrize("kernel", WAYS)
def test_memory_layout_does_not_matter(kernel):
    def make():
        p, g, v = tensors(torch.float32, 5, [(6, 4)] * 3)
        return [p.t()], [g.t().contiguous()], [v.abs().t()]

    mine, theirs = make(), make()
    kernel(*mine, AdagradRule(lr=0.1))
    adagrad_reference(*theirs, AdagradRule(lr=0.1))
    torch.testing.assert_close(mine[0][0], theirs[0][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("forced", ["reference", "foreach", "fused"])
def test_equal_to_torch(forced, monkeypatch):
    monkeypatch.setenv("DS_OP_ADAGRAD", forced)
    operations()["adagrad"].forget()
    try:
        pair = [torch.nn.Parameter(t) for t in (tensors(torch.float32, 3, [(20,)])[0] for _ in range(2))]
        optimizers = [
            cls([p], lr=0.05, weight_decay=0.1)
            for cls, p in zip((DeepSpeedCPUAdagrad, torch.optim.Adagrad), pair, strict=True)
        ]
        for step in range(5):
            for param, optimizer in zip(pair, optimizers, strict=True):
                (param.grad,) = tensors(torch.float32, 30 + step, [(20,)])
                optimizer.step()
        torch.testing.assert_close(pair[0], pair[1], rtol=1e-6, atol=1e-7)
        assert list(optimizers[0].state[pair[0]]) == ["step", "exp_avg_sq"]
    finally:
        monkeypatch.delenv("DS_OP_ADAGRAD")
        operations()["adagrad"].forget()


def test_defaults_of_the_reference():
    optimizer = DeepSpeedCPUAdagrad([torch.nn.Parameter(torch.ones(1))])
    assert {k: optimizer.defaults[k] for k in ("lr", "eps", "weight_decay")} == {
        "lr": 1e-2,
        "eps": 1e-10,
        "weight_decay": 0,
    }
