"""Triton's kernels for models beside their references, forward and backward."""

from functools import partial

import pytest
import torch

from .interpreted import DEVICE, close, gradients, numbers

from deepspeed.ops.model.gated import FORMS, bias_gelu_reference, bias_gelu_triton  # isort: skip
from deepspeed.ops.model.gated import (  # isort: skip
    ACTIVATIONS,
    gated_reference,
    gated_triton,
    halves_reference,
    halves_triton,
)
from deepspeed.ops.model.linear_loss import linear_loss, softmax_loss_reference_, softmax_loss_triton_, tile_rows
from deepspeed.ops.model.norm import (
    layer_norm_reference,
    layer_norm_triton,
    residual_sum_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from deepspeed.ops.model.rotary import rotary_reference, rotary_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def asked(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def compare(kernel, reference, inputs, dtype, outputs=1):
    """The kernel and the reference for the same inputs: values, then gradients of every input."""
    mine, theirs = asked(*inputs), asked(*inputs)
    found, expected = kernel(*mine), reference(*theirs)
    found, expected = (out if isinstance(out, tuple) else (out,) for out in (found, expected))
    found, expected = found[:outputs], expected[:outputs]
    close(found, expected, dtype)
    weights = [numbers(*out.shape, seed=3) for out in expected]
    close(gradients(found, mine, weights), gradients(expected, theirs, weights), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (7, 48), (5, 130)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype, rows, columns, offset):
    x, weight = numbers(rows, columns, dtype=dtype), numbers(columns, dtype=dtype)
    compare(
        lambda x, w: rms_norm_triton(x, None, w, 1e-6, offset)[0],
        lambda x, w: rms_norm_reference(x, None, w, 1e-6, offset)[0],
        (x, weight), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_a_residual_give_the_sum_and_its_gradients(dtype):
    x, residual, weight, bias = (numbers(*shape, dtype=dtype) for shape in ((2, 3, 24), (2, 3, 24), (24,), (24,)))
    compare(
        lambda x, r, w: rms_norm_triton(x, r, w, 1e-6, 0.0),
        lambda x, r, w: rms_norm_reference(x, r, w, 1e-6, 0.0),
        (x, residual, weight), dtype, outputs=2,
    )  # fmt: skip
    compare(
        lambda x, r, w, b: layer_norm_triton(x, r, w, b, 1e-5),
        lambda x, r, w, b: layer_norm_reference(x, r, w, b, 1e-5),
        (x, residual, weight, bias), dtype, outputs=2,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_that_keep_their_input_sum_its_gradients(dtype):
    x, weight, bias = (numbers(*shape, dtype=dtype) for shape in ((2, 3, 24), (24,), (24,)))
    compare(
        lambda x, w: rms_norm_triton(x, None, w, 1e-6, 0.0, keeps=True),
        lambda x, w: rms_norm_reference(x, None, w, 1e-6, 0.0),
        (x, weight), dtype, outputs=2,
    )  # fmt: skip
    compare(
        lambda x, w, b: layer_norm_triton(x, None, w, b, 1e-5, keeps=True),
        lambda x, w, b: layer_norm_reference(x, None, w, b, 1e-5),
        (x, weight, bias), dtype, outputs=2,
    )  # fmt: skip
    wanted = x.clone().requires_grad_()
    _, kept = rms_norm_triton(wanted, None, weight, 1e-6, 0.0, keeps=True)
    assert kept.data_ptr() == wanted.data_ptr(), "it is kept, not copied"
    (found,) = torch.autograd.grad(kept, wanted, torch.ones_like(kept))
    close([found], [torch.ones_like(found)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (7, 48), (5, 130)])
def test_layer_norm(dtype, rows, columns):
    inputs = (numbers(rows, columns, dtype=dtype), numbers(columns, dtype=dtype), numbers(columns, dtype=dtype, seed=1))
    compare(
        lambda x, w, b: layer_norm_triton(x, None, w, b, 1e-5)[0],
        lambda x, w, b: layer_norm_reference(x, None, w, b, 1e-5)[0],
        inputs, dtype,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_results_may_be_changed_in_place(shape):
    """As those of torch's own functions, by dropout for instance."""
    x, weight = numbers(*shape).requires_grad_(), numbers(8).requires_grad_()
    results = [
        rms_norm_triton(x, None, weight, 1e-6, 0.0)[0],
        layer_norm_triton(x, None, weight, weight, 1e-6)[0],
        bias_gelu_triton(x, weight, "gelu"),
        gated_triton(x, x, "silu"),
        halves_triton(x, "silu"),
    ]
    for result in results:
        (expected,) = torch.autograd.grad(result.sum() * 2, x, retain_graph=True)
        close([torch.autograd.grad(result.mul_(2).sum(), x)[0]], [expected], torch.float32)


def test_norms_of_nothing_and_of_rows_that_lie_apart():
    weight = numbers(8)
    assert rms_norm_triton(numbers(0, 8), None, weight, 1e-6, 0.0)[0].shape == (0, 8)
    wide, rows = numbers(4, 16)[:, ::2], numbers(4, 8)
    for norm in (rms_norm_triton, rms_norm_reference):
        results = norm(wide.t().contiguous().t(), rows, weight, 1e-6, 0.0)
        assert all(each.is_contiguous() for each in results), "whichever of the two is not"
    close(
        rms_norm_triton(wide, None, weight, 1e-6, 0.0)[:1],
        rms_norm_reference(wide, None, weight, 1e-6, 0.0)[:1],
        torch.float32,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated(dtype, kind):
    inputs = (numbers(2, 3, 1030, dtype=dtype), numbers(2, 3, 1030, dtype=dtype, seed=1))
    compare(lambda g, u: gated_triton(g, u, kind), lambda g, u: gated_reference(g, u, kind), inputs, dtype)
    both = (numbers(2, 3, 66, dtype=dtype),)
    compare(lambda b: halves_triton(b, kind), lambda b: halves_reference(b, kind), both, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMS)
def test_gelu_with_a_bias(dtype, kind):
    for shape in ((2, 3, 8), (1, 1), (37, 1030)):  # more rows than a tile has, more columns than a program
        inputs = (numbers(*shape, dtype=dtype), numbers(shape[-1], dtype=dtype, seed=1))
        kernel, plain = (partial(way, kind=kind) for way in (bias_gelu_triton, bias_gelu_reference))
        compare(kernel, plain, inputs, dtype)
    wide, bias = numbers(4, 32, dtype=dtype)[:, ::2], numbers(16)  # rows that lie apart, a bias of another dtype
    close([bias_gelu_triton(wide, bias, kind)], [bias_gelu_reference(wide, bias, kind)], dtype)
    nothing, bias = asked(numbers(0, 16), bias)
    bias_gelu_triton(nothing, bias, kind).sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batches", "angles"), [(1, 16), (2, 16), (1, 6)])
def test_rotary(dtype, batches, angles):
    q, k = (numbers(2, 5, heads, 16, dtype=dtype).transpose(1, 2) for heads in (3, 1))
    cos, sin = numbers(batches, 5, angles), numbers(batches, 5, angles, seed=1)
    compare(lambda q, k: rotary_triton(q, k, cos, sin), lambda q, k: rotary_reference(q, k, cos, sin), (q, k), dtype, 2)
    found, _ = rotary_triton(q, k, cos, sin)
    assert found.transpose(1, 2).is_contiguous(), "a linear layer reads it without a copy"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("classes", [3, 37, 9000])
def test_softmax_loss(dtype, cap, classes):
    logits, labels = numbers(4, classes, dtype=dtype), torch.tensor([1, -100, classes - 1, 0], device=DEVICE)
    mine, theirs = logits.clone(), logits.clone()
    options = {"ignored": -100, "cap": cap}
    close([softmax_loss_triton_(mine, labels, **options)], [softmax_loss_reference_(theirs, labels, **options)], dtype)
    close([mine], [theirs], dtype)
    kept = logits.clone()
    softmax_loss_triton_(kept, labels, **options, gradient=False)
    assert torch.equal(kept, logits)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("label", [-1, 5, 7])
def test_a_label_that_is_no_class_is_seen_in_the_loss(label, cap):
    """In place of what lies beside the row."""
    logits, labels = numbers(3, 5), torch.tensor([1, label, 2], device=DEVICE)
    losses = softmax_loss_triton_(logits, labels, ignored=-100, cap=cap)
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.isnan().tolist() == [[False] * 5, [True] * 5, [False] * 5]


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_loss_is_the_loss_of_whole_logits(monkeypatch, with_bias):
    monkeypatch.setattr("deepspeed.ops.model.linear_loss._TILE_BYTES", 1)
    monkeypatch.setattr("deepspeed.ops.model.linear_loss.tile_rows", lambda *_: 3)
    hidden, weight, bias = numbers(10, 8), numbers(21, 8), numbers(21) if with_bias else None
    labels = torch.tensor([0, 20, -100, 3, 4, -100, 6, 7, 8, 9], device=DEVICE)
    inputs = [hidden, weight] + [bias] * with_bias
    mine, theirs = asked(*inputs), asked(*inputs)
    found = linear_loss(*mine, *([] if with_bias else [None]), labels)
    logits = torch.nn.functional.linear(*theirs)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found * 3, mine), torch.autograd.grad(expected * 3, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_tiles_are_equal_and_bounded():
    for tokens, classes in ((0, 5), (1, 5), (16384, 32000), (100, 10**9), (5000, 256000)):
        rows = tile_rows(tokens, classes, 2)
        assert rows <= max(128, 2**28 // (2 * classes))
        assert tokens == 0 or rows * -(-tokens // rows) - tokens < -(-tokens // rows) + rows


def test_sums_of_few_elements_and_of_anything():
    x, y = numbers(3, 700, dtype=torch.float16), numbers(3, 700, dtype=torch.float16, seed=1)
    with torch.no_grad():
        for one, other in ((x, y), (x[:, ::2], y[:, 1::2]), (x, y[:1]), (x, y.float()), (x, 2.0), (0.5, x)):
            assert torch.equal(residual_sum_triton(one, other), one + other)
    weight = torch.ones((), device=x.device, requires_grad=True)
    assert residual_sum_triton(x * weight, y).requires_grad
