"""Tokens to rows and back: the kernels beside their references, and the gate's product beside float32."""

import pytest
import torch

from .interpreted import DEVICE, close, numbers

from deepspeed.ops.model.assignments import (  # isort: skip
    RowAssignment,
    combine_reference,
    combine_triton,
    slopes_reference,
    slopes_triton,
    spread_reference,
    spread_triton,
)
from deepspeed.ops.model.linear import in_two_parts, wide_linear_reference

TOKENS = 6


def places(choices, *, full):
    """Every assignment has a row of its own; without `full` some have none, and some rows are empty."""
    order = torch.randperm(choices * TOKENS, generator=torch.Generator().manual_seed(choices)).to(DEVICE)
    if full:
        return RowAssignment(order.view(choices, TOKENS), choices * TOKENS, full=True)
    count = choices * TOKENS + 3
    return RowAssignment(torch.where(order % 4 == 1, count, order).view(choices, TOKENS), count, full=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize("full", [True, False])
def test_kernels_and_references(dtype, choices, full):
    where = places(choices, full=full)
    tokens, grad = numbers(TOKENS, 20, dtype=dtype), numbers(TOKENS, 20, dtype=dtype, seed=1)
    weights = numbers(choices, TOKENS, seed=2)
    rows = spread_reference(tokens, where)
    by_loop = torch.zeros(where.count, 20, dtype=dtype, device=DEVICE)
    for choice in range(choices):
        for token, row in enumerate(where.rows[choice].tolist()):
            if row < where.count:
                by_loop[row] = tokens[token]
    assert torch.equal(rows, by_loop)
    assert torch.equal(spread_triton(tokens, where), rows)
    inner = numbers(where.count, 20, dtype=dtype, seed=3)
    for given in (weights, None):
        close([combine_triton(inner, given, where)], [combine_reference(inner, given, where)], dtype)
    close(slopes_triton(grad, inner, weights, where), slopes_reference(grad, inner, weights, where), dtype)


def test_slopes_are_those_of_autograd():
    where = places(2, full=False)
    rows = numbers(where.count, 5, seed=3).requires_grad_()
    weights = numbers(2, TOKENS).requires_grad_()
    kept = where.rows < where.count
    padded = torch.cat((rows, rows.new_zeros(1, 5)))
    total = (padded[where.rows.clamp(max=where.count)] * (weights * kept).unsqueeze(-1)).sum(0)
    torch.testing.assert_close(combine_reference(rows, weights, where), total)
    grad = numbers(TOKENS, 5, seed=4)
    expected = torch.autograd.grad(total, (rows, weights), grad)
    found = slopes_reference(grad, rows.detach(), weights.detach(), where)
    torch.testing.assert_close(found, expected)
    assert slopes_triton(grad, rows.detach(), weights.detach(), where, (True, False))[1] is None
    assert slopes_reference(grad, rows.detach(), weights.detach(), where, (False, True))[0] is None


def test_nothing_and_what_the_kernels_do_not_take():
    none = RowAssignment(torch.zeros(2, 0, dtype=torch.int64, device=DEVICE), 0, full=True)
    assert spread_triton(numbers(0, 4), none).shape == (0, 4)
    assert combine_triton(numbers(0, 4), numbers(2, 0), none).shape == (0, 4)
    where, wide = places(2, full=True), numbers(TOKENS, 4).double()
    assert spread_triton(wide, where).dtype == torch.float64
    empty = RowAssignment(torch.full((1, TOKENS), 0, device=DEVICE), 0, full=False)  # all were dropped
    assert combine_reference(numbers(0, 4), None, empty).eq(0).all()


def test_a_gradient_in_two_parts_has_sixteen_digits():
    values = numbers(40, 7)
    parts = in_two_parts(values, torch.bfloat16).float()
    torch.testing.assert_close(parts[:, :7] + parts[:, 7:], values, rtol=2**-16, atol=0)
    half = numbers(3, 8, dtype=torch.bfloat16), numbers(5, 8, dtype=torch.bfloat16, seed=1)
    found = wide_linear_reference(*half)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, half[0].float() @ half[1].float().t())
