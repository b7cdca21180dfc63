"""Products of 8-bit numbers with scales: op `fp8_product`; op `fp8_group_product` where parts of rows have scales."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.capability import has_block_scales, has_e4m3, on_cuda
from deepspeed.ops.fp8.groups import spread
from deepspeed.ops.model.linear import takes
from deepspeed.ops.precompile import is_placeholder
from deepspeed.ops.registry import by_triton, implements, op, reference

Scales = tuple[Tensor, Tensor]


def product(a: Tensor, b: Tensor, scales: Scales, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """(a · bᵀ) times its scales, in `dtype`: a is [m, k], b [n, k], and scales are what rounding them gave.

    `fast` sums in fewer bits where the hardware has that.
    """
    if all(scale.dim() == 0 or scale.shape == (len(x), 1) for x, scale in zip((a, b), scales, strict=True)):
        result: Tensor = op("fp8_product")(a, b, scales, dtype, fast=fast)
    else:
        result = op("fp8_group_product")(a, b, scales, dtype)
    return result


@reference("fp8_product")
def product_reference(a: Tensor, b: Tensor, scales: Scales, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """The same numbers multiplied as float32: right everywhere, and fast nowhere."""
    left, right = scales
    return ((a.float() @ b.float().t()) * left * (right.t() if right.dim() else right)).to(dtype)


@implements("fp8_product", name="scaled_mm", requires=on_cuda & has_e4m3, rank=20)
def product_scaled(a: Tensor, b: Tensor, scales: Scales, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """By torch's products of scaled 8-bit numbers; row-wise ones give bfloat16 only."""
    if not a.is_cuda:
        return product_reference(a, b, scales, dtype)
    left, right = scales
    by_rows = bool(left.dim())
    right, narrow = right.t() if by_rows else right, torch.bfloat16 if by_rows else dtype
    out = torch._scaled_mm(a, b.t(), left, right, out_dtype=narrow, use_fast_accum=fast)
    return out.to(dtype)


def emulated() -> bool:
    """True if 8-bit numbers are multiplied as float32 here, for want of units that multiply them."""
    return op("fp8_product") is product_reference


@reference("fp8_group_product")
def group_product_reference(a: Tensor, b: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """In plain torch, of float32 numbers."""
    left, right = (x.float() * spread(scale, x.shape) for x, scale in zip((a, b), scales, strict=True))
    return (left @ right.t()).to(dtype)


@by_triton("fp8_group_product", has_e4m3)
def group_product_triton(a: Tensor, b: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    if not takes(scales[0]):
        return group_product_reference(a, b, scales, dtype)
    from deepspeed.ops.fp8.kernels.product import group_product

    return group_product(a, b, scales, dtype)


@implements("fp8_group_product", name="scaled_mm", requires=has_block_scales, rank=30)
def group_product_scaled(a: Tensor, b: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """By torch's scaled products where they are right, else by the kernel; they give bfloat16."""
    squares = any(len(scale) != len(x) for x, scale in zip((a, b), scales, strict=True))
    if is_placeholder(a.device):
        return a.new_empty(len(a), len(b), dtype=dtype)
    if not a.is_cuda or (squares and scales[0].shape[1] % 4):  # torch would read scales of squares from other places
        return group_product_triton(a, b, scales, dtype)
    left, right = (_alone(scale, len(x)) for x, scale in zip((a, b), scales, strict=True))
    return torch._scaled_mm(a, b.t(), left, right.t(), out_dtype=torch.bfloat16).to(dtype)


def _alone(scale: Tensor, lines: int) -> Tensor:
    """The scales of some lines of a matrix, next to each other."""
    part = len(scale) == lines and scale.stride(1) != lines
    return scale.t().contiguous().t() if part else scale
