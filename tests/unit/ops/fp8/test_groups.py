"""Scales of rows, strips and squares: kernels beside their references, products beside dequantised numbers, layers."""

from functools import partial

import pytest
import torch

from tests.unit.ops.model.interpreted import DEVICE, numbers

from deepspeed.ops.fp8.groups import round_groups_reference, round_groups_triton, spread  # isort: skip
from deepspeed.ops.fp8.kernels.product import group_product
from deepspeed.ops.fp8.linear import Fp8Linear, round_input
from deepspeed.ops.fp8.product import group_product_reference, product

E4 = torch.float8_e4m3fn
ROWS, STRIPS, SQUARES = ("row", "row"), ("strip", "square"), ("square", "strip")


def values(codes, scale):
    return codes.float() * spread(scale, codes.shape)


def layouts(rounded):
    """(codes, scales) of those that are there."""
    pairs = (rounded.rows, rounded.scale), (rounded.columns, rounded.turned)
    return [pair for pair in pairs if pair[0] is not None]


def same(found, expected):
    """Equal scales in equal memory; the interpreter loses the carry of some numbers, as in test_fp8.py."""
    pairs = list(zip(layouts(found), layouts(expected), strict=True))
    assert pairs
    for (codes, scale), (others, other) in pairs:
        torch.testing.assert_close(scale, other, rtol=1e-6, atol=0)
        assert (scale.stride(), codes.stride()) == (other.stride(), others.stride())
        one, two = values(codes, scale), values(others, other)
        # the last bit of a scale decides ties, which numbers of 16 bits often have
        assert ((one - two).abs() > 1e-6 * two.abs()).float().mean() < (0.08 if DEVICE == "cpu" else 5e-3)


@pytest.mark.parametrize("forms", [ROWS, STRIPS, SQUARES])
@pytest.mark.parametrize(("sides", "dim", "other"), [((48,), 0, 144), ((128, 16), 1, 130), ((16, 144), 0, 70)])
@pytest.mark.parametrize("asked", [(True, True), (False, True), (True, False)])
def test_both_layouts_and_parts_of_a_matrix(forms, sides, dim, other, asked):
    parts = [numbers(*((side, other) if dim == 0 else (other, side)), dtype=torch.bfloat16) * side for side in sides]
    rows, columns = asked
    expected = round_groups_reference(parts, dim, E4, forms, rows=rows, columns=columns)
    same(round_groups_triton(parts, dim, E4, forms, rows=rows, columns=columns), expected)
    exact, kept = torch.cat(parts, dim).float(), [form for form, one in zip(forms, asked, strict=True) if one]
    for (codes, scale), form in zip(layouts(expected), kept, strict=True):
        matrix = exact if codes.shape == exact.shape else exact.t()
        grain = {"row": (1, matrix.shape[1]), "strip": (1, 128), "square": (128, 128)}[form]
        assert scale.shape == tuple(-(-size // step) for size, step in zip(matrix.shape, grain, strict=True))
        assert (
            (values(codes, scale) - matrix).abs() <= matrix.abs() * 2**-4 + spread(scale, matrix.shape) * 2**-9
        ).all()


def test_zeros_stay_zeros():
    for forms in (ROWS, STRIPS, SQUARES):
        for codes, scale in layouts(round_groups_triton([torch.zeros(16, 144, device=DEVICE)], 0, E4, forms)):
            assert scale.isfinite().all()
            assert (values(codes, scale) == 0).all()


@pytest.mark.parametrize("forms", [("strip", "square"), ("strip", "strip"), ("square", "strip")])
def test_products_with_tails_and_with_scales_of_a_part(forms):
    a, b = numbers(144, 304), numbers(272, 304, seed=1)
    rtol, atol = (1e-4, 1e-3) if DEVICE == "cpu" else (2e-2, 0.1)  # devices give bfloat16, of sums in fewer bits
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    (left, one), (right, two) = (
        layouts(round_groups_reference([x], 0, E4, (form, form), columns=False))[0]
        for x, form in zip((a, b), forms, strict=True)
    )
    exact = values(left, one) @ values(right, two).t()
    close(product(left, right, (one, two), torch.float32), exact)
    close(group_product(left, right, (one, two), torch.float32), exact)
    rows, lines = (128, 128) if forms[0] == "strip" else (128, 1)
    part = left[:rows], right, (one[:lines], two), torch.float32
    close(group_product(*part), group_product_reference(*part))


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_gradients_are_near_where_rows_are_of_other_magnitudes(scaling):
    """With one scale for each tensor the small rows and columns would vanish; forward and backward of three layers."""
    x = (numbers(144, 64) * torch.logspace(-4, 2, 144, device=DEVICE)[:, None]).requires_grad_()
    weights = [numbers(size, 64, seed=size).requires_grad_() for size in (128, 48, 16)]
    outs = Fp8Linear.apply(x, round_input(x.detach(), scaling, columns=True), scaling, *weights)
    grads = [numbers(*out.shape, seed=7) / x.detach()[:, :1].abs().clamp(min=1e-4) for out in outs]
    found = *outs, *torch.autograd.grad(outs, [x, *weights], grads)
    plain = [x @ weight.t() for weight in weights]
    expected = *plain, *torch.autograd.grad(plain, [x, *weights], grads)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < (0.05 if scaling != "tensor" else 0.1) * other.norm()
    apart = [(one - other).norm(dim=1) / other.norm(dim=1) for one, other in zip(outs, plain, strict=True)]
    assert all((each.max() < 0.1) == (scaling == "row" or scaling == "block") for each in apart)
