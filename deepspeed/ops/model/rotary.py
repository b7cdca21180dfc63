"""Rotary position embedding of queries and keys: op `rotary`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

Pair = tuple[Tensor, Tensor]


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Rotate the halves of [batch, heads, tokens, width] by angles of [1 or batch, tokens, angles], in float32.

    Where width is larger than angles, what is behind them stays.
    """
    result: Pair = op("rotary")(q, k, cos, sin)
    return result


@reference("rotary")
def rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    wide_cos, wide_sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)

    def turn(x: Tensor) -> Tensor:
        turned, rest = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, -1)
        done = (turned * wide_cos + torch.cat((-second, first), -1) * wide_sin).to(x.dtype)
        return torch.cat((done, rest), -1) if rest.shape[-1] else done

    return turn(q), turn(k)


class Rotary(torch.autograd.Function):
    """The Triton kernel; its backward is the same kernel with the transposed rotation."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        from deepspeed.ops.model.kernels.rotary import rotate

        ctx.save_for_backward(cos, sin)
        return rotate(_lines(q), _lines(k), cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.model.kernels.rotary import rotate

        cos, sin = ctx.saved_tensors
        return *rotate(_lines(dq), _lines(dk), cos, sin, transposed=True), None, None


def _lines(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@by_triton("rotary")
def rotary_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """By the kernel where it can: even widths, angles that need no gradient."""
    whole = q.dim() == 4 and cos.dim() == 3 and q.shape[-1] >= cos.shape[-1] and cos.shape[-1] % 2 == 0
    if not (takes(q) and whole and q.dtype == k.dtype) or cos.requires_grad or sin.requires_grad:
        return rotary_reference(q, k, cos, sin)
    result: Pair = Rotary.apply(q, k, _lines(cos), _lines(sin))  # type: ignore[no-untyped-call]
    return result
