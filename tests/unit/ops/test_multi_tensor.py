"""Arithmetic over tensor lists: every implementation against the reference, the reference against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.ops.multi_tensor import (
    global_norm,
    global_norm_reference,
    scale_,
    scale_reference,
    sum_of_squares,
)
from deepspeed.ops.registry import operations

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Bound of the relative error of one rounding, with room for another order of summation.
PRECISION = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
SPECIAL = (math.inf, -math.inf, math.nan)


def ways(name: str) -> list:
    """Each implementation of an op that runs here, except the reference."""
    able = [each for each in operations()[name].implementations if each.requires.holds and each.name != "reference"]
    return [pytest.param(each.load(), id=each.name) for each in able]


def shapes(draw):
    return draw(st.lists(st.integers(0, 4), max_size=3))


@st.composite
def tensors(draw, special: bool = False):
    """A list of tensors of mixed dtypes and shapes; some are views with gaps."""
    found = []
    for _ in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.randn(shapes(draw), generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
        if special and values.numel() and draw(st.booleans()):
            values.view(-1)[draw(st.integers(0, values.numel() - 1))] = draw(st.sampled_from(SPECIAL))
        each = values.to(dtype)
        if each.dim() and draw(st.booleans()):
            each = torch.stack([each, each], dim=-1)[..., 0]
        found.append(each)
    return found


def copies(given):
    return [each.clone() for each in given]


def assert_same(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype
        tolerance = PRECISION[left.dtype]
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


orders = st.sampled_from([1.0, 2.0, 3.0, math.inf])
factors = st.floats(-8, 8, width=32)


@pytest.mark.parametrize("way", ways("global_norm"))
@settings(max_examples=60, deadline=None)
@given(given=tensors(special=True), p=orders)
def test_norm_agrees_with_the_reference(way, given, p):
    assert_same([way(given, p)], [global_norm_reference(given, p)])


@settings(max_examples=60, deadline=None)
@given(given=tensors(), p=orders)
def test_norm_is_the_norm_of_the_concatenation(given, p):
    flat = torch.cat([torch.zeros(1, dtype=torch.float64), *(each.double().flatten() for each in given)])
    expected = torch.linalg.vector_norm(flat, p)
    result = global_norm(given, p)
    assert result.dtype == (torch.float64 if any(t.dtype == torch.float64 for t in given) else torch.float32)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("way", ways("scale"))
@settings(max_examples=60, deadline=None)
@given(given=tensors(special=True), factor=factors)
def test_scale_agrees_with_the_reference(way, as_tensor, given, factor):
    by = torch.tensor(factor) if as_tensor else factor
    actual, expected = copies(given), copies(given)
    way(actual, by)
    scale_reference(expected, by)
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_are_summed_in_float64(dtype):
    """Small and large tensors, those with gaps and empty ones; cut elsewhere, the sum rounds to the same float32."""
    torch.manual_seed(0)
    large = torch.randn(3 * 65_536 + 17).to(dtype)
    given = [large, torch.ones(3, dtype=dtype), torch.empty(0, dtype=dtype), torch.randn(300, 700).to(dtype).t()]
    expected = sum(each.double().square().sum() for each in given)
    found = sum_of_squares(given)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert sum_of_squares([*large.split(999), *given[1:]]).float() == found.float()


def test_squares_of_a_large_tensor_make_no_large_copy():
    given = torch.ones(1 << 20)
    with torch.profiler.profile(profile_memory=True) as found:
        sum_of_squares([given])
    largest = max(event.cpu_memory_usage for event in found.events())
    assert 0 < largest <= given.nbytes // 4


def test_empty_lists():
    assert global_norm([]) == torch.zeros(())
    assert global_norm([torch.empty(0), torch.empty(3, 0)], math.inf) == 0
    scale_([], 2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_norms_do_not_overflow_or_lose(dtype):
    many = torch.full((100_000,), 8.0, dtype=dtype)  # the sum of squares is far beyond float16
    assert global_norm([many, many]).item() == pytest.approx(8.0 * math.sqrt(200_000), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_factor_is_not_rounded_to_the_tensors_dtype(dtype, as_tensor):
    factor = 1.0 / 3.0e7  # zero in float16
    given = torch.tensor([60000.0, 30000.0], dtype=dtype)
    wanted = (given.double() * factor).to(dtype)
    scale_([given], torch.tensor(factor) if as_tensor else factor)
    torch.testing.assert_close(given, wanted, rtol=1e-2, atol=1e-7)
    assert given.abs().min() > 0


def test_zero_does_not_hide_a_nan():
    y = torch.tensor([math.nan, math.inf, 1.0])
    scale_([y], 0.0)
    assert y.isnan().tolist() == [True, True, False]
    assert global_norm([torch.ones(2), y]).isnan()


def test_leaves_that_require_grad():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    assert not global_norm([weight]).requires_grad
    scale_([weight], 2.0)
    assert weight.tolist() == [6.0, 8.0]
    assert weight.is_leaf


@pytest.mark.parametrize("p", [0.0, -1.0, math.nan])
def test_orders_that_are_none(p):
    with pytest.raises(ValueError, match="order of a norm"):
        global_norm([torch.ones(2)], p)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_device", [False, True])
def test_devices_are_mixed(dtype, on_device):
    factor = 1 / 3.0e7
    here = torch.linspace(1000, 60000, 64, dtype=dtype)
    wanted = here.double() * factor
    there = here.cuda()
    assert global_norm([there, here]).device.type == "cuda"
    expected = global_norm_reference([here, here])
    torch.testing.assert_close(global_norm([there, here]).cpu(), expected, rtol=1e-5, atol=0)
    scale_([there, here], torch.tensor(factor, device="cuda") if on_device else factor)
    for each in (here, there.cpu()):
        torch.testing.assert_close(each, wanted.to(dtype), rtol=PRECISION[dtype], atol=1e-7)


def test_foreach_is_what_runs():
    for name in ("global_norm", "scale"):
        best = operations()[name].implementations[0]
        assert best.name == "foreach"
        assert operations()[name].chosen[1] is best.load()
