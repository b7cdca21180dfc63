"""RMS and layer normalisation with the residual added before them: ops `rms_norm` and `layer_norm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspeed.ops.model.linear import rows_of, shaped, takes, takes_rows
from deepspeed.ops.registry import by_triton, op, reference

Pair = tuple[Tensor, Tensor]
FEW = 2**20
"""Elements of a sum whose launch takes longer than reading them."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, residual: Tensor | None = None, keeps: bool = False
) -> Pair:
    """(norm(x + residual) · (weight + offset), x + residual), computed in float32 and rounded once, in x's dtype.

    With `keeps` and no residual, gradients of both results are summed where the norm's own is computed.
    """
    result: Pair = op("rms_norm")(x, residual, weight, eps, offset, keeps)
    return result


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, residual: Tensor | None = None, keeps: bool = False
) -> Pair:
    """(norm(x + residual) · weight + bias, x + residual), computed in float32 and rounded once, in x's dtype.

    With `keeps` and no residual, gradients of both results are summed where the norm's own is computed.
    """
    result: Pair = op("layer_norm")(x, residual, weight, bias, eps, keeps)
    return result


def residual_sum(residual: Any, x: Any) -> Any:
    """residual + x, op `residual_sum`; few elements without gradients do not interrupt a chain of kernels."""
    return op("residual_sum")(residual, x)


@reference("residual_sum")
def residual_sum_reference(residual: Any, x: Any) -> Any:
    return residual + x


@by_triton("residual_sum")
def residual_sum_triton(residual: Any, x: Any) -> Any:
    """By the kernel where it can; code may add anything."""
    alike = (
        isinstance(x, Tensor)
        and isinstance(residual, Tensor)
        and (x.shape, x.dtype) == (residual.shape, residual.dtype)
    )
    if not alike or torch.is_grad_enabled() or not 0 < x.numel() <= FEW or not takes(x) or x.device != residual.device:
        return residual + x
    from deepspeed.ops.model.kernels.norm import small_sum

    return small_sum(residual.contiguous(), x.contiguous())


@reference("rms_norm")
def rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, _keeps: bool = False
) -> Pair:
    total = x if residual is None else (x + residual).contiguous()  # as that of the kernels
    wide = total.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * (weight.float() + offset)).to(x.dtype), total


@reference("layer_norm")
def layer_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, _keeps: bool = False
) -> Pair:
    total = x if residual is None else (x + residual).contiguous()  # as that of the kernels
    normal = functional.layer_norm(total.float(), total.shape[-1:], weight.float(), bias.float(), eps)
    return normal.to(x.dtype), total


class Norm(torch.autograd.Function):
    """The Triton kernels with their backward: layer normalisation where there is a bias, else RMS."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        numbers: tuple[float, float],
        keeps: bool,
    ) -> Tensor | Pair:
        from deepspeed.ops.model.kernels.norm import norm_forward

        rows = None if residual is None else rows_of(residual)
        eps, offset = numbers
        y, total, facts = norm_forward(rows_of(x), rows, weight, bias, eps, offset)
        ctx.save_for_backward(total, weight, *facts)
        ctx.adds, ctx.offset = residual is not None, offset
        y = shaped(y, x.shape)
        if residual is not None:
            return y, total.view(x.shape)
        return (y, x) if keeps else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.model.kernels.norm import norm_backward

        total, weight, *facts = ctx.saved_tensors
        further = None if dtotal is None else rows_of(dtotal)
        dx, found = norm_backward(rows_of(dy), further, total, weight, facts, ctx.offset)
        dx, (dweight, *dbias) = dx.view(dy.shape), found.to(weight.dtype)
        return dx, dx if ctx.adds else None, dweight, dbias[0] if dbias else None, None, None


def _computed(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: float, keeps: bool
) -> Pair:
    result: Any = Norm.apply(x, residual, weight, bias, (eps, offset), keeps)  # type: ignore[no-untyped-call]
    return (result, x) if residual is None and not keeps else result


@by_triton("rms_norm")
def rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, keeps: bool = False
) -> Pair:
    """By the kernels where they can, which is not on the host."""
    if not takes_rows(x):
        return rms_norm_reference(x, residual, weight, eps, offset, keeps)
    return _computed(x, residual, weight, None, eps, offset, keeps)


@by_triton("layer_norm")
def layer_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, keeps: bool = False
) -> Pair:
    """By the kernels where they can, which is not on the host."""
    if not takes_rows(x):
        return layer_norm_reference(x, residual, weight, bias, eps, keeps)
    return _computed(x, residual, weight, bias, eps, 0.0, keeps)
