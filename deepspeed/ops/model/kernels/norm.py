"""RMS and layer normalisation of rows, with the residual added before: forward and backward in a pass over memory each.

A kernel CENTRES for layer normalisation, which also has a bias; RMS normalisation adds `offset` to its weight instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import after_others, cdiv, overlaps, programs, row_block, stages, warps
from deepspeed.ops.precompile import launch


@triton.jit
def _norm_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, scale_ptr, columns, eps, offset,
    ADDS: tl.constexpr, CENTRES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * columns + at, x, mask=inside)
        x = x.to(tl.float32)
    if CENTRES:
        mean = tl.sum(x, axis=0) / columns
        tl.store(mean_ptr + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / columns + eps)
    tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRES:
        y = x * scale * weight + tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        y = x * scale * (weight + offset)
    tl.store(y_ptr + row * columns + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum(x_ptr, other_ptr, y_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_others(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size).to(tl.float32) + tl.load(other_ptr + at, mask=at < size).to(tl.float32)
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < size)


def small_sum(x: Tensor, other: Tensor) -> Tensor:
    """x + other of contiguous tensors of one shape, by a launch that may begin before the one ahead of it has ended."""
    y, size = torch.empty_like(x), x.numel()
    launch(_sum, (cdiv(size, 1024),), x, other, y, size, BLOCK=1024, num_warps=4, **overlaps(x.device))
    return y


@triton.jit
def _norm_backward(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, mean_ptr, scale_ptr, dx_ptr, dweight_ptr, dbias_ptr, rows, columns, offset,
    ADDS: tl.constexpr, CENTRES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if not CENTRES:
        weight += offset
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    start = number.to(tl.int64) * columns
    stride = tl.num_programs(0).to(tl.int64) * columns
    for each in tl.range(number, rows, tl.num_programs(0), num_stages=STAGES):
        scale = tl.load(scale_ptr + each)
        x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRES:
            normal = tl.where(inside, (x - tl.load(mean_ptr + each)) * scale, 0.0)
        else:
            normal = x * scale
        dy = tl.load(dy_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        dweight += dy * normal
        dnormal = dy * weight
        if ADDS:
            dsum = tl.load(dsum_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        along = tl.sum(dnormal * normal, axis=0) / columns
        if CENTRES:
            dbias += dy
            dx = (dnormal - tl.sum(dnormal, axis=0) / columns - normal * along) * scale
        else:
            dx = (dnormal - normal * along) * scale
        if ADDS:
            dx += dsum
        tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        start += stride
    tl.store(dweight_ptr + number.to(tl.int64) * columns + at, dweight, mask=inside)
    if CENTRES:
        tl.store(dbias_ptr + number.to(tl.int64) * columns + at, dbias, mask=inside)


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(normalised, x + residual, facts of each row) of contiguous rows; layer normalisation where there is a bias.

    Facts are 1 / root mean square, or 1 / deviation and the mean.
    """
    rows, columns = x.shape
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    facts = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 if bias is None else 2)]
    block = row_block(columns)
    if rows:
        launch(
            _norm_forward, (rows,),
            x, x if residual is None else residual, weight, weight if bias is None else bias, y, total, facts[-1],
            facts[0], columns, eps, offset, ADDS=residual is not None, CENTRES=bias is not None, BLOCK=block,
            num_warps=warps(block), **overlaps(x.device),
        )  # fmt: skip
    return y, total, facts


def norm_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, facts: Sequence[Tensor], offset: float
) -> tuple[Tensor, Tensor]:
    """(gradient of x and of the residual, gradients in float32 of the weight [1, …], or of weight and bias [2, …])."""
    rows, columns = total.shape
    dx = torch.empty_like(total)
    block, count = row_block(columns), programs(total.device, rows, per_unit=2)
    partial = torch.empty(len(facts), count, columns, dtype=torch.float32, device=total.device)
    if rows:
        launch(
            _norm_backward, (count,),
            dy, dy if dtotal is None else dtotal, total, weight, facts[-1], facts[0], dx, partial[0], partial[-1],
            rows, columns, offset, ADDS=dtotal is not None, CENTRES=len(facts) == 2, BLOCK=block,
            STAGES=stages(block, total.dtype), num_warps=warps(block),
        )  # fmt: skip
    return dx, partial.sum(1)
