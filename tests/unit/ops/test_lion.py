"""Lion: every implementation against the reference, the reference and the classes against the formula."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion, LionRule, lion_reference
from deepspeed.ops.registry import operations

WAYS = [
    pytest.param(each.load(), id=each.name)
    for each in operations()["lion"].implementations
    if each.requires.holds and each.name != "reference"
]
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float16, torch.float16, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),
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
    rule = LionRule(lr=1e-2, beta1=0.8, beta2=0.95, weight_decay=decay)
    mine = [tensors(dtypes[0], 0), tensors(dtypes[2], 1)]
    for step in range(4):
        theirs = [[t.clone() for t in part] for part in mine]
        for run, (p, m) in ((kernel, mine), (lion_reference, theirs)):
            run(p, tensors(dtypes[1], 10 + step), m, rule)
        for left, right in zip(chain(*mine), chain(*theirs), strict=True):
            assert left.dtype == right.dtype
            bound = TOLERANCE[left.dtype]
            torch.testing.assert_close(left, right, rtol=bound, atol=bound)


@pytest.mark.parametrize("cls", [FusedLion, DeepSpeedCPULion])
def test_formula(cls):
    param = torch.nn.Parameter(tensors(torch.float64, 3, [(40,)])[0])
    p, m = param.detach().clone(), torch.zeros(40, dtype=torch.float64)
    optimizer = cls([param], lr=0.02, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(5):
        (g,) = tensors(torch.float64, 20 + step, [(40,)])
        param.grad = g.clone()
        optimizer.step()
        p = p - 0.02 * (torch.sign(0.8 * m + 0.2 * g) + 0.1 * p)
        m = 0.9 * m + 0.1 * g
    torch.testing.assert_close(param.detach(), p, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], m, rtol=1e-12, atol=1e-12)
    assert list(optimizer.state[param]) == ["step", "exp_avg"]
    assert optimizer.state[param]["step"] == 5


def test_no_gradient_means_no_direction():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([1.0, 0.0, -1.0])
    FusedLion([param], lr=0.5).step()
    assert param.tolist() == [0.5, 1.0, 1.5]


def test_dtype_of_the_momentum():
    for arguments, expected in (({}, torch.float32), ({"fp32_optimizer_states": False}, torch.float16)):
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        param.grad = torch.ones_like(param)
        optimizer = DeepSpeedCPULion([param], **arguments)
        optimizer.step()
        assert optimizer.state[param]["exp_avg"].dtype == expected
