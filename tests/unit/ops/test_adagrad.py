"""Adagrad: every implementation against the reference, the class against torch.optim.Adagrad."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from deepspeed.ops.adagrad import AdagradRule, DeepSpeedCPUAdagrad, adagrad_reference
from deepspeed.ops.one_pass import OnePass
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


@pytest.mark.parametrize(("bits", "bound"), [(None, 1e-6), (16, 1e-2), (8, 1e-2)])
def test_rows_of_sparse_gradients_are_updated_as_torch_does(bits, bound):
    theirs, mine = (torch.nn.Embedding(20, 8, sparse=True) for _ in range(2))
    mine.load_state_dict(theirs.state_dict())
    gains = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]  # dense, in the same group
    optimizers = (
        DeepSpeedCPUAdagrad([mine.weight, gains[0]], lr=0.1, moment_bits=bits),
        torch.optim.Adagrad([theirs.weight, gains[1]], lr=0.1),
    )
    before = mine.weight.detach().clone()
    for step in range(3):
        tokens = torch.tensor([[1, 5, 1], [7, 5 + step, 19]])  # a row may come several times
        for table, gain, optimizer in zip((mine, theirs), gains, optimizers, strict=True):
            optimizer.zero_grad()
            (table(tokens) * gain).square().sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=bound, atol=bound)
    torch.testing.assert_close(gains[0], gains[1], rtol=bound, atol=bound)
    untouched = [row for row in range(20) if row not in (1, 5, 6, 7, 19)]
    assert torch.equal(mine.weight[untouched], before[untouched])
    assert optimizers[0].state[mine.weight]["step"] == 3


def test_rows_of_sparse_gradients_in_one_pass_and_with_weight_decay():
    dense, sparse = (torch.nn.Parameter(torch.arange(6.0).view(3, 2) + 1) for _ in range(2))
    rows = torch.tensor([0, 2])
    sparse.grad = torch.sparse_coo_tensor(rows[None], torch.ones(2, 2), (3, 2), check_invariants=True)
    dense.grad = torch.ones(3, 2)
    copies = {param: torch.zeros(3, 2, dtype=torch.bfloat16) for param in (dense, sparse)}
    for param in (dense, sparse):
        optimizer = DeepSpeedCPUAdagrad([param], lr=0.1, weight_decay=0.5)
        optimizer.one_pass = OnePass(factor=0.5, outs=copies)
        optimizer.step()
    torch.testing.assert_close(sparse[rows], dense[rows])
    torch.testing.assert_close(copies[sparse][rows], copies[dense][rows])
    assert torch.equal(sparse[1], torch.tensor([3.0, 4.0]))
    sparse.grad = torch.sparse_coo_tensor(size=(3, 2))
    optimizer.step()
    assert optimizer.state[sparse]["step"] == 2


def test_defaults_of_the_reference():
    optimizer = DeepSpeedCPUAdagrad([torch.nn.Parameter(torch.ones(1))])
    assert {k: optimizer.defaults[k] for k in ("lr", "eps", "weight_decay")} == {
        "lr": 1e-2,
        "eps": 1e-10,
        "weight_decay": 0,
    }
