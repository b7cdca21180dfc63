"""Lets the tests of this folder run Triton's kernels without a GPU, in Triton's own interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1" else "cpu"


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def gradients(outputs, inputs, weights):
    """Gradients of a weighted sum of the outputs."""
    total = sum((out.float() * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs)


def close(found, expected, dtype):
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance)
