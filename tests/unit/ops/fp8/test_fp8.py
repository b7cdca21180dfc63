"""Products of 8-bit numbers: kernels beside their references, the layer beside a linear layer."""

from contextlib import ExitStack

import pytest
import torch

from tests.unit.ops.model.interpreted import DEVICE, numbers

from deepspeed.ops.fp8.quantise import (  # isort: skip
    round_rows_reference,
    round_rows_triton,
    round_tensor_reference,
    round_tensor_triton,
)
from deepspeed.fusion import fp8_linear
from deepspeed.fusion.build import find_products, put
from deepspeed.fusion.fp8_linear import _seconds, choose_scaling
from deepspeed.ops.fp8.product import product_reference

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(16, 32), (70, 130), (1, 16), (128, 64)]


def values(rounded):
    return rounded.rows.float() * rounded.scale


def same(found, expected, dtype):
    """Equal but for ties; the interpreter also loses the carry of some numbers that round up to a power of two."""
    step = 2.0 ** -(3 if dtype == E4 else 2)
    apart = (values(found) - values(expected)).abs() > step * values(expected).abs()
    assert apart.sum() <= (max(1, 0.05 * apart.numel()) if DEVICE == "cpu" else 0)


@pytest.mark.parametrize("dtype", [E4, E5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_one_scale(dtype, shape, source):
    x = numbers(*shape, dtype=source) * 37
    found, expected = round_tensor_triton([x], 0, dtype), round_tensor_reference([x], 0, dtype)
    torch.testing.assert_close(found.scale, expected.scale)
    assert torch.equal(found.rows.float(), found.columns.t().float())
    same(found, expected, dtype)
    assert (values(expected) - x.float()).abs().max() / x.float().abs().max() < 2**-3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_for_each_row(shape):
    x = numbers(*shape) * torch.logspace(-6, 3, shape[0], device=DEVICE)[:, None]
    found, expected = round_rows_triton(x, E4), round_rows_reference(x, E4)
    torch.testing.assert_close(found.scale, expected.scale)
    same(found, expected, E4)
    assert ((values(expected) - x).abs() <= x.abs().amax(1, keepdim=True) * 2**-4).all()


@pytest.mark.parametrize("only", ["rows", "columns"])
def test_what_nobody_asks_for_is_not_made(only):
    found = round_tensor_triton([numbers(16, 32)], 0, E4, rows=only == "rows", columns=only == "columns")
    assert (found.rows is None, found.columns is None) == (only != "rows", only != "columns")


@pytest.mark.parametrize("rounds", [round_tensor_triton, round_tensor_reference])
def test_a_scale_that_is_known_gives_the_same_numbers(rounds):
    x = numbers(48, 32, dtype=torch.bfloat16) * 37
    first = rounds([x], 0, E4)
    again = rounds([x], 0, E4, rows=False, scale=first.scale)
    assert again.scale is first.scale
    assert torch.equal(again.columns.float(), first.columns.float())


def test_zeros_stay_zeros():
    zeros = torch.zeros(16, 16, device=DEVICE)
    for rounded in (round_tensor_triton([zeros], 0, E4), round_rows_triton(zeros, E4)):
        assert (values(rounded) == 0).all()


def test_a_product_with_scales():
    a, b = round_rows_reference(numbers(8, 32), E4), round_rows_reference(numbers(4, 32, seed=1), E4)
    found = product_reference(a.rows, b.rows, (a.scale, b.scale), torch.float32)
    torch.testing.assert_close(found, values(a) @ values(b).t())


def layer(scaling, bias=True, **exclude):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=bias), torch.nn.Tanh(), torch.nn.Linear(48, 7))
    stack = ExitStack()
    findings = list(find_products(module, scaling, **exclude))
    put(findings, stack)
    return module, findings, stack


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("rows", [(16,), (3, 5), (1,)])
def test_a_layer_is_near_the_exact_one(scaling, rows):
    module, findings, stack = layer(scaling)
    assert [type(finding.result).__name__ for finding in findings] == ["Swap", "Refused"]
    x = torch.randn(*rows, 32, requires_grad=True)
    out = module(x)
    out.square().sum().backward()
    grads = [x.grad, *(param.grad for param in module.parameters())]
    stack.close()
    assert "forward" not in module[0].__dict__
    exact = x.detach().clone().requires_grad_()
    module.zero_grad()
    expected = module(exact)
    expected.square().sum().backward()
    for mine, theirs in zip([out, *grads], [expected, exact.grad, *(p.grad for p in module.parameters())], strict=True):
        assert (mine - theirs).norm() / theirs.norm() < 0.15


def test_frozen_weights_get_no_gradient_and_excluded_layers_stay():
    module, _, stack = layer("tensor", bias=False)
    module[0].weight.requires_grad_(False)
    x = torch.randn(16, 32, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert module[0].weight.grad is None
    stack.close()
    _, findings, _ = layer("tensor", exclude=["0"])
    assert [finding.name for finding in findings] == ["2"]


def test_layers_that_read_one_input_round_it_once(monkeypatch):
    counted = []
    real = fp8_linear.round_input

    def count(*args, **kwargs):
        counted.append(args[0].shape)
        return real(*args, **kwargs)

    monkeypatch.setattr(fp8_linear, "round_input", count)

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 32)

        def forward(self, x):
            return self.a(x), self.b(x)

    module = Two()
    put(list(find_products(module, "tensor")), ExitStack())
    x = torch.randn(16, 16)
    module(x)
    assert len(counted) == 1
    x.mul_(2)  # the same tensor with other numbers
    first, _ = module(x)
    assert len(counted) == 2
    assert (first - torch.nn.functional.linear(x, module.a.weight, module.a.bias)).norm() / first.norm() < 0.1


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_compiler_sees_operations_that_give_the_same(scaling, gradients):
    """Also of an input that is no multiple of anything, with a bias, and in evaluation."""

    def outcome(compiled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))
        x = torch.randn(7, 32, requires_grad=gradients)
        with ExitStack() as undo, torch.set_grad_enabled(gradients):
            put(list(find_products(model, scaling)), undo)
            run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            out = run(x)
            if gradients:
                out.square().sum().backward()
        return [out.detach(), *(each.grad for each in (x, *model.parameters()) if gradients)]

    for found, expected in zip(outcome(True), outcome(False), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"block": 1.04, "row": 1.0, "tensor": 1.02}, "block"),
        ({"block": 1.06, "row": 1.04, "tensor": 1.0}, "row"),
        ({"block": 2.0, "row": 1.2, "tensor": 1.0}, "tensor"),
    ],
)
def test_auto_takes_the_most_exact_that_is_about_as_fast(seconds, expected):
    shapes = {(32, 16): 3, (16, 32): 1}
    found, total = choose_scaling(shapes, torch.bfloat16, lambda scaling, width, out, dtype: seconds[scaling] * width)
    assert found == expected
    assert total == pytest.approx({each: took * 112 for each, took in seconds.items()})


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_recipes_are_measured_by_training(scaling):
    assert _seconds(scaling, 32, 16, torch.bfloat16, times=1) > 0
