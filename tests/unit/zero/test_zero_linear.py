"""The linear layer without a saved weight: parity with torch's, and what happens when the weight is released."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.zero.public.linear import LinearFunctionForZeroStage3, LinearModuleForZeroStage3, zero3_linear_wrap


def tensors(shape, bias=True, dtype=torch.float64, needs=(True, True, True)):
    torch.manual_seed(0)
    x = torch.randn(*shape, 5, dtype=dtype).requires_grad_(needs[0])
    weight = nn.Parameter(torch.randn(3, 5, dtype=dtype), requires_grad=needs[1])
    return x, weight, nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=needs[2]) if bias else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3), (0,)], ids=str)
def test_gradcheck(shape, bias):
    given = [each for each in tensors(shape, bias) if each is not None]
    assert torch.autograd.gradcheck(zero3_linear_wrap, given)
    assert torch.autograd.gradgradcheck(zero3_linear_wrap, given)
    assert torch.equal(zero3_linear_wrap(*given), functional.linear(*given))


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_only_what_is_needed(needs):
    mine, theirs = tensors((2, 4), needs=needs), tensors((2, 4), needs=needs)
    output, expected = zero3_linear_wrap(*mine), functional.linear(*theirs)
    assert output.requires_grad == any(needs)
    if not any(needs):
        return
    output.square().sum().backward()
    expected.square().sum().backward()
    for each, other in zip(mine, theirs, strict=True):
        assert (each.grad is None) == (other.grad is None)
        if each.grad is not None:
            torch.testing.assert_close(each.grad, other.grad)


def test_a_weight_that_was_computed():
    x, weight, bias = tensors((4,))
    zero3_linear_wrap(x, weight * 2, bias).sum().backward()
    x2, weight2, bias2 = tensors((4,))
    functional.linear(x2, weight2 * 2, bias2).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(weight.grad, weight2.grad)


def test_the_graph_keeps_no_memory_of_the_weight():
    x, weight, bias = tensors((4,))
    values, expected = weight.detach().clone(), tensors((4,))
    functional.linear(*expected).square().sum().backward()
    loss = zero3_linear_wrap(x, weight, bias).square().sum()
    memory = weakref.ref(weight.untyped_storage())
    weight.data = torch.empty(0, dtype=torch.float64)
    gc.collect()
    assert memory() is None, "the released memory is still held"
    weight.data = values  # gathered again, elsewhere
    loss.backward()
    for mine, other in zip((x, weight, bias), expected, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_weight_whose_storage_was_emptied_and_filled():
    x, weight, bias = tensors((4,))
    values, size = weight.detach().clone(), weight.untyped_storage().size()
    loss = zero3_linear_wrap(x, weight, bias).square().sum()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(size)
    weight.data.copy_(values)
    loss.backward()
    expected = tensors((4,))
    functional.linear(*expected).square().sum().backward()
    torch.testing.assert_close(x.grad, expected[0].grad)


def test_a_weight_that_is_still_released():
    x, weight, bias = tensors((4,))
    loss = zero3_linear_wrap(x, weight, bias).sum()
    weight.data = torch.empty(0, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"shape \(0,\), forward used \(3, 5\).*register_external_parameter"):
        loss.backward()


def test_hooks_on_saved_tensors_see_activations_only():
    x, weight, bias = tensors((4,))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.shape), t)[1], lambda t: t):
        loss = zero3_linear_wrap(x, weight, bias).sum()
    assert packed == [x.shape]
    loss.backward()


def test_a_weight_that_was_written():
    x, weight, bias = tensors((4,))
    loss = zero3_linear_wrap(x, weight, bias).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(UsageError, match=r"weight of shape \(3, 5\).*written in place 1 times"):
        loss.backward()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ndim", [1, 2])
def test_autocast(ndim, bias):
    shape = (4, 6)[:ndim]
    mine, theirs = tensors(shape, bias, torch.float32), tensors(shape, bias, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = zero3_linear_wrap(*mine), functional.linear(*theirs)
    assert output.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    output.float().square().sum().backward()
    expected.float().square().sum().backward()
    for each, other in zip(mine, theirs, strict=True):
        if each is not None:
            assert each.grad.dtype == torch.float32
            torch.testing.assert_close(each.grad, other.grad, rtol=1e-2, atol=1e-2)


def test_backward_computes_as_forward_did_whatever_is_on_now():
    x, weight, bias = tensors((4,), dtype=torch.float32)
    loss = zero3_linear_wrap(x, weight, bias).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    expected = tensors((4,), dtype=torch.float32)
    functional.linear(*expected).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected[1].grad)
    torch.testing.assert_close(x.grad, expected[0].grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    x, weight, bias = tensors((4,))
    out = torch.utils.checkpoint.checkpoint(zero3_linear_wrap, x, weight, bias, use_reentrant=reentrant)
    out.square().sum().backward()
    expected = tensors((4,))
    functional.linear(*expected).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected[1].grad)


@pytest.mark.parametrize("bias", [True, False])
def test_module(bias):
    torch.manual_seed(3)
    mine = LinearModuleForZeroStage3(5, 3, bias=bias)
    torch.manual_seed(3)
    theirs = nn.Linear(5, 3, bias=bias)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(mine.weight, theirs.weight)
    x = torch.randn(2, 5)
    assert torch.equal(mine(x), theirs(x))
    assert mine(x).grad_fn.name().startswith(LinearFunctionForZeroStage3.__name__)
    with torch.no_grad():
        assert not mine(x).requires_grad
