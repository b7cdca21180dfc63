"""Linear layers that read one input, beside torch's one by one."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.ops.model.linear import linears

OUTS = (5, 3, 3)


def made(shape, biases, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def tensor(*size):
        return torch.randn(size, generator=generator, dtype=dtype).requires_grad_()

    return tensor(*shape), [tensor(out, 4) for out in OUTS], [tensor(out) if biases else None for out in OUTS]


def one_by_one(x, weights, biases):
    return tuple(functional.linear(x, *each) for each in zip(weights, biases, strict=True))


def gradients(compute, x, weights, biases, *, used=(0, 1, 2)):
    results = compute(x, weights, biases)
    inputs = [each for each in (x, *weights, *biases) if each is not None and each.requires_grad]
    loss = sum(results[at].sin().sum() * (at + 1) for at in used)
    return [*results, *torch.autograd.grad(loss, inputs, allow_unused=True)]


@pytest.mark.parametrize("shape", [(4,), (7, 4), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("biases", [False, True])
def test_the_same_values_and_gradients(shape, biases):
    inputs = made(shape, biases)
    torch.testing.assert_close(gradients(linears, *inputs), gradients(one_by_one, *inputs))


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2)])
def test_results_that_nobody_uses_have_no_gradient(used):
    inputs = made((2, 3, 4), True)
    found, expected = (gradients(each, *inputs, used=used) for each in (linears, one_by_one))
    assert [each is None for each in found] == [each is None for each in expected]
    assert any(each is None for each in found)
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("frozen", ["x", "weights", "a weight", "biases"])
def test_what_is_frozen_gets_none_and_is_not_kept(frozen):
    x, weights, biases = made((2, 3, 4), True)
    for each in {"x": [x], "weights": weights, "a weight": weights[:1], "biases": biases}[frozen]:
        each.requires_grad_(False)
    torch.testing.assert_close(gradients(linears, x, weights, biases), gradients(one_by_one, x, weights, biases))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        linears(x, weights, biases)
    expected = {"x": [x], "weights": weights}.get(frozen, [x, *weights])
    assert [each.data_ptr() for each in kept] == [each.data_ptr() for each in expected]


def test_gradients_that_lie_otherwise_in_memory():
    x, weights, biases = made((2, 3, 4), False)

    def turned(compute):
        return torch.autograd.grad(sum((each.transpose(0, 1).exp() ** 2).sum() for each in compute), [x, *weights])

    torch.testing.assert_close(turned(linears(x, weights, biases)), turned(one_by_one(x, weights, biases)))


def test_gradients_have_gradients():
    x, weights, biases = made((2, 4), True)

    def compute(*inputs):
        return linears(inputs[0], inputs[1:4], inputs[4:])

    assert torch.autograd.gradgradcheck(compute, (x, *weights, *biases))


class Additions(TorchDispatchMode):
    def __init__(self, shape):
        super().__init__()
        self.shape, self.seen = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen += func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and out.shape == self.shape
        return out


def test_no_addition_is_left():
    x, weights, biases = made((2, 3, 4), False)
    counts = []
    for compute in (linears, one_by_one):
        loss = sum(each.sum() for each in compute(x * 1, weights, biases))
        with Additions(x.shape) as additions:
            torch.autograd.grad(loss, x)
        counts.append(additions.seen)
    assert counts == [0, 2]
