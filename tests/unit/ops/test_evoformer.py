"""Evoformer attention equals its formula, forward and backward, however it is cut into parts; sums of images."""

from __future__ import annotations

import math

import pytest
import torch
from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

from deepspeed.errors import UsageError
from deepspeed.ops import evoformer
from deepspeed.ops.op_builder import EvoformerAttnBuilder, SpatialInferenceBuilder
from tests.unit.ops.model import interpreted


def formula(query, key, value, *biases):
    q, k, v = (each.transpose(2, 3) for each in (query, key, value))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    for bias in biases:
        if bias is not None:
            scores = scores + bias
    return (scores.softmax(-1) @ v).transpose(2, 3)


def scene(samples=2, rows=3, queries=13, heads=2, width=5, keys=None, dtype=torch.float64):
    torch.manual_seed(0)
    keys = keys or queries
    shapes = (
        (samples, rows, queries, heads, width),
        (samples, rows, keys, heads, width),
        (samples, rows, keys, heads, width),
        (samples, rows, 1, 1, keys),
        (samples, 1, heads, queries, keys),
    )
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("scores", [2**23, 700, 60, 1], ids=["whole", "rows", "queries", "single"])
@pytest.mark.parametrize("keys", [13, 7])
def test_equals_the_formula(scores, keys, monkeypatch):
    monkeypatch.setattr(evoformer, "_SCORES", scores)
    inputs = scene(keys=keys)
    found, expected = DS4Sci_EvoformerAttention(*inputs[:3], inputs[3:]), formula(*inputs)
    torch.testing.assert_close(found, expected)
    seed = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, seed), torch.autograd.grad(expected, inputs, seed), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("which", [(), (None, 1), (0,), (0, None)])
def test_biases_may_be_left_out(which):
    *tensors, first, second = scene()
    biases = [None if each is None else (first, second)[each] for each in which]
    found, expected = DS4Sci_EvoformerAttention(*tensors, biases), formula(*tensors, *biases)
    torch.testing.assert_close(found, expected)
    given = [*tensors, *(bias for bias in biases if bias is not None)]
    for one, other in zip(
        torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_bias_without_a_gradient_gets_none():
    *tensors, first, second = scene()
    DS4Sci_EvoformerAttention(*tensors, [first.detach(), second]).sum().backward()
    assert first.grad is None
    assert second.grad is not None


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype(dtype, autocast):
    """As near as one rounding of the exact result, and autocast changes nothing."""
    inputs = scene(queries=33, dtype=dtype)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = DS4Sci_EvoformerAttention(*inputs[:3], inputs[3:])
        found.sum().backward()
    expected = formula(*exact)
    assert found.dtype == dtype
    expected.sum().backward()
    near = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)
    for one, other in zip(inputs, exact, strict=True):
        assert one.grad.dtype == dtype
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=4 * near, atol=4 * near)


def test_keys_that_are_masked_out_and_queries_without_any():
    *tensors, first, second = scene()
    with torch.no_grad():
        first[0, 0, ..., 4:] = -math.inf
        first[1, 2] = -math.inf
    out = DS4Sci_EvoformerAttention(*tensors, [first, second])
    torch.testing.assert_close(out[0], formula(*tensors, first, second)[0])
    assert torch.equal(out[1, 2], torch.zeros_like(out[1, 2]))
    out.sum().backward()
    assert all(bool(each.grad.isfinite().all()) for each in tensors)
    assert torch.equal(tensors[2].grad[1, 2], torch.zeros_like(out[1, 2]))


def test_what_is_kept_for_backward_does_not_grow_with_the_scores():
    kept = []
    inputs = scene(samples=1, rows=4, queries=64, heads=2, width=4, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        DS4Sci_EvoformerAttention(*inputs[:3], inputs[3:])
        ours = sum(kept)
        kept.clear()
        formula(*inputs)
    assert 4 * (ours - sum(each.numel() for each in inputs)) < sum(kept)


@pytest.mark.parametrize(("keyed", "paired", "keys"), [(True, True, 19), (True, False, 32), (False, True, 16)])
def test_kernels_equal_the_reference(keyed, paired, keys, monkeypatch):
    """Several tiles each way, a last one that is cut short, a row without any key or of large ones, views."""
    from deepspeed.ops.kernels import evoformer as kernels

    monkeypatch.setattr(kernels, "_OF_FLOAT32", kernels.EvoformerTile(16, 16, 1, 1))
    inputs = scene(samples=2, rows=2, queries=17, heads=1, keys=keys, dtype=torch.float32)
    with torch.no_grad():
        inputs[3][1, 0] = -math.inf
        inputs[3][0, 1] += 200
    inputs = [each.to(interpreted.DEVICE).detach().requires_grad_() for each in inputs]
    *tensors, mask, pairs = inputs
    biases = (mask if keyed else None, pairs if paired else None)
    taken = [*tensors, *(bias for bias in biases if bias is not None)]
    results = []
    for run in (evoformer.attend_in_tiles, evoformer.attend):
        out = run(tensors[0].transpose(2, 3).contiguous().transpose(2, 3), *tensors[1:], *biases)
        results.append((out, *torch.autograd.grad((out * out.detach().cos()).sum(), taken)))
    interpreted.close(*results, torch.float32)


def test_queries_whose_keys_all_have_one_large_negative_bias():
    """A mask of -1e9 leaves equal weights, forward and backward."""
    *tensors, first, second = scene(dtype=torch.float32)
    with torch.no_grad():
        first[:] = -1e9
    for found, expected in zip(
        *(
            torch.autograd.grad(run().square().sum(), tensors[2])
            for run in (
                lambda: DS4Sci_EvoformerAttention(*tensors, [first, second]),
                lambda: formula(*tensors, first, second),
            )
        ),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda q, k, v, a, b: (q[0], k, v, []), r"expected \[samples, rows, tokens, heads, d\]"),
        (lambda q, k, v, a, b: (q, k[:, :, 1:], v, []), "equal tokens in K and V"),
        (lambda q, k, v, a, b: (q, k, v, [b]), r"bias 1 has shape .*expected \(2, 3, 1, 1, 13\)"),
        (lambda q, k, v, a, b: (q, k, v, [a, a]), r"bias 2 has shape .*expected \(2, 1, 2, 13, 13\)"),
        (lambda q, k, v, a, b: (q, k, v, [a, b, b]), "3 biases are given; expected at most 2"),
    ],
)
def test_what_does_not_fit_is_refused(call, said):
    with pytest.raises(UsageError, match=said):
        DS4Sci_EvoformerAttention(*call(*scene()))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_sums_of_images(memory_format):
    torch.manual_seed(0)
    images, other = (torch.randn(2, 3, 5, 4).to(memory_format=memory_format) for _ in range(2))
    bias, other_bias = torch.randn(3), torch.randn(3)
    module = SpatialInferenceBuilder().load()
    wide = bias.view(1, 3, 1, 1)
    for found, expected in (
        (module.nhwc_bias_add(images, bias), images + wide),
        (module.nhwc_bias_add_add(images, bias, other), images + wide + other),
        (
            module.nhwc_bias_add_bias_add(images, bias, other, other_bias),
            images + wide + other + other_bias.view(1, 3, 1, 1),
        ),
    ):
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous(memory_format=memory_format)
    with pytest.raises(UsageError, match=r"expected \[channels\]"):
        module.nhwc_bias_add(images, torch.randn(5))


def test_the_builder_brings_the_function():
    assert EvoformerAttnBuilder().load().DS4Sci_EvoformerAttention is DS4Sci_EvoformerAttention
