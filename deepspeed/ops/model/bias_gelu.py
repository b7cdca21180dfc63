"""GELU of x + bias, the middle of plain feed-forward layers: op `bias_gelu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.capability import has_triton, on_cuda
from deepspeed.ops.model.device import takes
from deepspeed.ops.model.gated import ACTIVATIONS
from deepspeed.ops.model.shape import shaped
from deepspeed.ops.registry import implementation, op, reference

__all__ = ["FORMS", "bias_gelu", "bias_gelu_reference"]

FORMS = ("gelu", "gelu_tanh")
"""By the error function, and its approximation by tanh."""


def bias_gelu(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """GELU of x + bias, computed in float32 and rounded once, in x's dtype; bias is [last dim of x], kind of FORMS."""
    result: Tensor = op("bias_gelu")(x, bias, kind)
    return result


@reference("bias_gelu")
def bias_gelu_reference(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """In plain torch."""
    return ACTIVATIONS[kind](x.float() + bias.float()).to(x.dtype)


class BiasGelu(torch.autograd.Function):
    """The Triton kernels; nothing but their inputs is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kind: str) -> Tensor:
        from deepspeed.ops.model.kernels.bias_gelu import bias_gelu_forward

        ctx.save_for_backward(x, bias)
        ctx.kind = kind
        return shaped(bias_gelu_forward(_rows(x), bias, kind), x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.model.kernels.bias_gelu import bias_gelu_backward

        x, bias = ctx.saved_tensors
        dx, dbias = bias_gelu_backward(_rows(dy), _rows(x), bias, ctx.kind)
        return dx.view(dy.shape), dbias.to(bias.dtype), None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def bias_gelu_triton(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """By the kernels where they can."""
    if not takes(x):
        return bias_gelu_reference(x, bias, kind)
    result: Tensor = BiasGelu.apply(x, bias, kind)  # type: ignore[no-untyped-call]
    return result


@implementation("bias_gelu", name="triton", requires=has_triton & on_cuda, rank=20)
def _load_bias_gelu() -> Callable[..., Tensor]:
    return bias_gelu_triton
