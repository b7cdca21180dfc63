"""Matrices that are rounded as one, and layers that are computed as one."""

from functools import partial

import pytest
import torch

from tests.unit.ops.model.interpreted import DEVICE, numbers

from deepspeed.ops.fp8.linear import Fp8FeedForward  # isort: skip
from deepspeed.ops.fp8.linear import Fp8Linear, round_input
from deepspeed.ops.fp8.quantise import round_tensor, round_tensor_reference, round_tensor_triton
from deepspeed.ops.model.gated import (
    ACTIVATIONS,
    gated,
    slopes_reference,
    slopes_triton,
    values_reference,
    values_triton,
)

SOME = [("silu", "row"), ("gelu", "block")]
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rounds", [round_tensor_triton, round_tensor_reference])
@pytest.mark.parametrize("sides", [(16, 144, 70), (256, 64), (16, 16, 300, 16), (16, 80, 48, 33, 200)])
def test_matrices_are_rounded_as_one(dim, layouts, rounds, sides):
    matrices = [
        numbers(*((side, 130) if dim == 0 else (130, side)), dtype=torch.bfloat16, seed=side) * side for side in sides
    ]
    rows, columns = layouts
    found = rounds(matrices, dim, E4, rows=rows, columns=columns)
    whole = rounds([torch.cat(matrices, dim)], 0, E4)
    assert torch.equal(found.scale, whole.scale)
    for one, other, asked in ((found.rows, whole.rows, rows), (found.columns, whole.columns, columns)):
        assert (one is not None) == asked
        assert one is None or (torch.equal(one.float(), other.float()) and one.is_contiguous())
    again = rounds(matrices, dim, E4, rows=rows, columns=columns, scale=found.scale)
    largest = torch.stack([x.abs().amax() for x in matrices]).amax().float()
    known = rounds(matrices, dim, E4, rows=rows, columns=columns, largest=largest)
    for each in (again, known):
        assert torch.equal(each.scale, found.scale)
        assert each.rows is None or torch.equal(each.rows.float(), found.rows.float())
        assert each.columns is None or torch.equal(each.columns.float(), found.columns.float())


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 2 * 48), (33, 2 * 1100)])
def test_the_largest_of_what_is_written(kind, dtype, shape):
    both, grad = numbers(*shape, dtype=dtype), numbers(shape[0], shape[1] // 2, dtype=dtype, seed=1)
    exact = {"rtol": 2**-7, "atol": 1e-5} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for (found, largest), (expected, _) in (
        (values_triton(both, kind), values_reference(both, kind)),
        (slopes_triton(grad, both, kind), slopes_reference(grad, both, kind)),
    ):
        torch.testing.assert_close(found, expected, **exact)
        assert largest == found.float().abs().max(), "of the numbers as they lie in memory"


def leaf(*shape, seed, scale=1.0):
    return (numbers(*shape, seed=seed) * scale).requires_grad_()


def together(x, *weights):
    return Fp8Linear.apply(x, round_tensor(x.detach(), E4), "tensor", *weights)


def test_several_layers_are_one_wide_layer():
    x = leaf(32, 48, seed=0)
    weights = [leaf(out, 48, seed=out, scale=out) for out in (16, 64, 32)]
    outs = together(x, *weights)
    grads = [numbers(*out.shape, seed=7 + at) for at, out in enumerate(outs)]
    found = torch.autograd.grad(outs, [x, *weights], grads)
    wide = torch.cat([weight.detach() for weight in weights]).requires_grad_()
    (out,) = together(x, wide)
    torch.testing.assert_close(torch.cat(outs, 1), out)
    dx, dw = torch.autograd.grad(out, [x, wide], torch.cat(grads, 1))
    torch.testing.assert_close(found[0], dx)
    torch.testing.assert_close(torch.cat(found[1:]), dw)


def test_a_layer_whose_result_nobody_used():
    x = leaf(32, 48, seed=0)
    one, other = leaf(16, 48, seed=1), leaf(32, 48, seed=2)
    first, _ = together(x, one, other)
    dx, dw, none = torch.autograd.grad(first.square().sum(), [x, one, other], allow_unused=True)
    assert none is None
    exact = torch.autograd.grad((x @ one.t()).square().sum(), [x, one])
    for found, expected in zip((dx, dw), exact, strict=True):
        assert (found - expected).norm() < 0.15 * expected.norm()


def whole(x, kind, *weights, grad=True, scaling="tensor"):
    return Fp8FeedForward.apply(x, round_input(x.detach(), scaling, columns=grad), (kind, scaling), *weights)


def exact(x, kind, gate, up, down):
    return gated(x @ gate.t(), x @ up.t(), kind) @ down.t()


def parts(seed=0):
    return (
        leaf(32, 48, seed=seed),
        leaf(64, 48, seed=seed + 1, scale=0.2),
        leaf(64, 48, seed=seed + 2, scale=0.2),
        leaf(16, 64, seed=seed + 3),
    )


def near(found, expected):
    assert (found - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize(("kind", "scaling"), [*((kind, "tensor") for kind in ACTIVATIONS), *SOME])
def test_a_feed_forward_layer_is_near_the_exact_one(kind, scaling):
    inputs = parts()
    results = []
    for compute in (partial(whole, scaling=scaling), exact):
        out = compute(inputs[0], kind, *inputs[1:])
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for found, expected in zip(*results, strict=True):
        near(found, expected)


@pytest.mark.parametrize("frozen", [(0,), (1, 2, 3), (3,), (0, 1, 2), (0, 1), (2,)])
def test_frozen_parts_get_no_gradient_and_change_no_other(frozen):
    inputs = parts()
    all_of_them = torch.autograd.grad(whole(inputs[0], "silu", *inputs[1:]).square().sum(), inputs)
    for at in frozen:
        inputs[at].requires_grad_(False)
    whole(inputs[0], "silu", *inputs[1:]).square().sum().backward()
    for at, (each, expected) in enumerate(zip(inputs, all_of_them, strict=True)):
        if at in frozen:
            assert each.grad is None
        else:
            torch.testing.assert_close(each.grad, expected)


def test_a_graph_that_is_kept_can_be_gone_through_again():
    inputs = parts()
    out = whole(inputs[0], "silu", *inputs[1:]).sum()
    once, twice = torch.autograd.grad(out, inputs, retain_graph=True), torch.autograd.grad(out, inputs)
    for one, other in zip(once, twice, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_kept_without_gradients():
    inputs = parts()
    with torch.no_grad():
        out = whole(inputs[0], "silu", *inputs[1:], grad=False)
    assert not out.requires_grad
    assert torch.equal(out, whole(inputs[0], "silu", *inputs[1:]).detach())
    assert out.device.type == DEVICE
