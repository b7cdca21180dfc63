"""RMS and layer normalisation with the residual added before them: ops `rms_norm` and `layer_norm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from deepspeed.ops.model.linear import rows_of, shaped, takes_rows
from deepspeed.ops.registry import by_triton, op, reference

Pair = tuple[Tensor, Tensor]


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


class RmsNorm(torch.autograd.Function):
    """The Triton kernels with their backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, keeps: bool
    ) -> Any:
        from deepspeed.ops.model.kernels.norm import rms_norm_forward

        y, total, scale = rms_norm_forward(
            rows_of(x), None if residual is None else rows_of(residual), weight, eps, offset
        )
        ctx.save_for_backward(total, weight, scale)
        _remember(ctx, residual is not None, offset)
        return _results(shaped(y, x.shape), x, None if residual is None else total.view(x.shape), keeps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.model.kernels.norm import rms_norm_backward

        total, weight, scale = ctx.saved_tensors
        further = None if dtotal is None else rows_of(dtotal)
        dx, dweight = rms_norm_backward(rows_of(dy), further, total, weight, scale, ctx.offset)
        dx = dx.view(dy.shape)
        return dx, dx if ctx.adds else None, dweight.to(weight.dtype), None, None, None


class LayerNorm(torch.autograd.Function):
    """The Triton kernels with their backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, keeps: bool
    ) -> Any:
        from deepspeed.ops.model.kernels.norm import layer_norm_forward

        rows = None if residual is None else rows_of(residual)
        y, total, mean, scale = layer_norm_forward(rows_of(x), rows, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, scale)
        _remember(ctx, residual is not None, 0.0)
        return _results(shaped(y, x.shape), x, None if residual is None else total.view(x.shape), keeps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.model.kernels.norm import layer_norm_backward

        total, weight, mean, scale = ctx.saved_tensors
        further = None if dtotal is None else rows_of(dtotal)
        dx, dweight, dbias = layer_norm_backward(rows_of(dy), further, total, weight, mean, scale)
        dx = dx.view(dy.shape)
        return dx, dx if ctx.adds else None, dweight.to(weight.dtype), dbias.to(weight.dtype), None, None


def _results(y: Tensor, x: Tensor, total: Tensor | None, keeps: bool) -> Tensor | Pair:
    if total is not None:
        return y, total
    return (y, x) if keeps else y


def _remember(ctx: Any, adds: bool, offset: float) -> None:
    ctx.adds, ctx.offset = adds, offset


@by_triton("rms_norm")
def rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, keeps: bool = False
) -> Pair:
    """By the kernels where they can, which is not on the host."""
    if not takes_rows(x):
        return rms_norm_reference(x, residual, weight, eps, offset, keeps)
    if residual is None and not keeps:
        return RmsNorm.apply(x, None, weight, eps, offset, False), x  # type: ignore[no-untyped-call]
    result: Pair = RmsNorm.apply(x, residual, weight, eps, offset, keeps)  # type: ignore[no-untyped-call]
    return result


@by_triton("layer_norm")
def layer_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, keeps: bool = False
) -> Pair:
    """By the kernels where they can, which is not on the host."""
    if not takes_rows(x):
        return layer_norm_reference(x, residual, weight, bias, eps, keeps)
    if residual is None and not keeps:
        return LayerNorm.apply(x, None, weight, bias, eps, False), x  # type: ignore[no-untyped-call]
    result: Pair = LayerNorm.apply(x, residual, weight, bias, eps, keeps)  # type: ignore[no-untyped-call]
    return result
