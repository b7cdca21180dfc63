"""RMS normalisation of rows, with the residual added before it: forward and backward in one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import after_others, overlaps, programs, row_block, stages, warps
from deepspeed.ops.precompile import launch


@triton.jit
def _rms_forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, scale_ptr, columns, eps, offset,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / columns + eps)
    tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(y_ptr + row * columns + at, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_backward(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, scale_ptr, dx_ptr, dweight_ptr, rows, columns, offset,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    start = number.to(tl.int64) * columns
    stride = tl.num_programs(0).to(tl.int64) * columns
    for each in tl.range(number, rows, tl.num_programs(0), num_stages=STAGES):
        scale = tl.load(scale_ptr + each)
        normal = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32) * scale
        dy = tl.load(dy_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        dweight += dy * normal
        dnormal = dy * weight
        if ADDS:
            dsum = tl.load(dsum_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        dx = (dnormal - normal * (tl.sum(dnormal * normal, axis=0) / columns)) * scale
        if ADDS:
            dx += dsum
        tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        start += stride
    tl.store(dweight_ptr + number.to(tl.int64) * columns + at, dweight, mask=inside)


def rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised, x + residual, 1 / root mean square of each row) of contiguous rows."""
    rows, columns = x.shape
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = row_block(columns)
    if rows:
        launch(
            _rms_forward, (rows,),
            x, x if residual is None else residual, weight, y, total, scale, columns, eps, offset,
            ADDS=residual is not None, BLOCK=block, num_warps=warps(block), **overlaps(x.device),
        )  # fmt: skip
    return y, total, scale


def rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(gradient of x and of the residual, gradient of the weight in float32)."""
    rows, columns = total.shape
    dx = torch.empty_like(total)
    block, count = row_block(columns), programs(total.device, rows, per_unit=2)
    partial = torch.empty(count, columns, dtype=torch.float32, device=total.device)
    if rows:
        launch(
            _rms_backward, (count,),
            dy, dy if dtotal is None else dtotal, total, weight, scale, dx, partial, rows, columns, offset,
            ADDS=dtotal is not None, BLOCK=block, STAGES=stages(block, total.dtype), num_warps=warps(block),
        )  # fmt: skip
    return dx, partial.sum(0)


@triton.jit
def _layer_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, scale_ptr, columns, eps,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * columns + at, x, mask=inside)
        x = x.to(tl.float32)
    mean = tl.sum(x, axis=0) / columns
    centred = tl.where(inside, x - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + at, (centred * scale * weight + bias).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _layer_backward(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, mean_ptr, scale_ptr, dx_ptr, dweight_ptr, dbias_ptr, rows, columns,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    start = number.to(tl.int64) * columns
    stride = tl.num_programs(0).to(tl.int64) * columns
    for each in tl.range(number, rows, tl.num_programs(0), num_stages=STAGES):
        scale = tl.load(scale_ptr + each)
        x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (x - tl.load(mean_ptr + each)) * scale, 0.0)
        dy = tl.load(dy_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        dweight += dy * normal
        dbias += dy
        dnormal = dy * weight
        if ADDS:
            dsum = tl.load(dsum_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        along = tl.sum(dnormal * normal, axis=0) / columns
        dx = (dnormal - tl.sum(dnormal, axis=0) / columns - normal * along) * scale
        if ADDS:
            dx += dsum
        tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        start += stride
    tl.store(dweight_ptr + number.to(tl.int64) * columns + at, dweight, mask=inside)
    tl.store(dbias_ptr + number.to(tl.int64) * columns + at, dbias, mask=inside)


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normalised, x + residual, mean, 1 / deviation of each row) of contiguous rows."""
    rows, columns = x.shape
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    mean, scale = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    block = row_block(columns)
    if rows:
        launch(
            _layer_forward, (rows,),
            x, x if residual is None else residual, weight, bias, y, total, mean, scale, columns, eps,
            ADDS=residual is not None, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return y, total, mean, scale


def layer_norm_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x and of the residual, of the weight and of the bias in float32)."""
    rows, columns = total.shape
    dx = torch.empty_like(total)
    block, count = row_block(columns), programs(total.device, rows, per_unit=2)
    partial = torch.empty(2, count, columns, dtype=torch.float32, device=total.device)
    if rows:
        launch(
            _layer_backward, (count,),
            dy, dy if dtotal is None else dtotal, total, weight, mean, scale, dx, partial[0], partial[1], rows, columns,
            ADDS=dtotal is not None, BLOCK=block, STAGES=stages(block, total.dtype), num_warps=warps(block),
        )  # fmt: skip
    dweight, dbias = partial.sum(1)
    return dx, dweight, dbias
