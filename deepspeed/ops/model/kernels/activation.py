"""Activations with their derivatives, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["KINDS", "act"]

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def act(x, KIND: tl.constexpr):
    """(activation, derivative)"""
    if KIND == 0:
        sigmoid = tl.sigmoid(x)
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif KIND == 1:
        cdf = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        half = tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
        slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
        return x * half, half + x * 2.0 * half * (1.0 - half) * slope
