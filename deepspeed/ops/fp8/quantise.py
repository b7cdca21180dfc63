"""Numbers rounded to 8 bits with a scale: one for a whole tensor, or one for each row or column.

Ops `fp8_tensor`, `fp8_rows`, `fp8_columns`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.ops.capability import has_triton, on_cuda
from deepspeed.ops.model.device import takes, takes_rows
from deepspeed.ops.registry import implementation, op, reference

__all__ = ["Rounded", "round_columns", "round_rows", "round_tensor"]

_NARROW = (torch.bfloat16, torch.float16)

SMALLEST = 1e-12
"""A magnitude below which nothing is told apart from zero; the scale of zeros must not be 0."""

Pair = tuple[Tensor | None, Tensor | None]


class Rounded(NamedTuple):
    """A matrix in 8 bits. Its values are those of `rows` times `scale`."""

    rows: Tensor | None
    """[m, n], contiguous; None where nobody asked for it."""
    columns: Tensor | None
    """[n, m], contiguous: the transpose."""
    scale: Tensor
    """float32: a scalar, [m, 1] of the rows, or [n, 1] of the columns."""


def round_tensor(
    x: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True, scale: Tensor | None = None
) -> Rounded:
    """A matrix rounded with one scale, by its largest magnitude, in the layouts that are asked for.

    A `scale` that is known from rounding the same numbers before spares a pass over them.
    """
    result: Rounded = op("fp8_tensor")(x.contiguous(), dtype, rows=rows, columns=columns, scale=scale)
    return result


def round_rows(x: Tensor, dtype: torch.dtype) -> Rounded:
    """A matrix rounded with a scale for each row."""
    result: Rounded = op("fp8_rows")(x.contiguous(), dtype)
    return result


def round_columns(x: Tensor, dtype: torch.dtype) -> Rounded:
    """The transpose of a matrix, rounded with a scale for each of its rows."""
    result: Rounded = op("fp8_columns")(x.contiguous(), dtype)
    return result


@reference("fp8_tensor")
@torch.no_grad()
def round_tensor_reference(
    x: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True, scale: Tensor | None = None
) -> Rounded:
    """In plain torch."""
    if scale is None:
        largest = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        scale = largest.clamp(min=SMALLEST) / torch.finfo(dtype).max
    rounded = _rounded(x.float() / scale, dtype)
    return Rounded(rounded if rows else None, rounded.t().contiguous() if columns else None, scale)


@reference("fp8_rows")
@torch.no_grad()
def round_rows_reference(x: Tensor, dtype: torch.dtype) -> Rounded:
    """In plain torch."""
    largest = x.abs().amax(1, keepdim=True).float() if x.numel() else x.new_zeros(x.shape[0], 1, dtype=torch.float32)
    scale = largest.clamp(min=SMALLEST) / torch.finfo(dtype).max
    return Rounded(_rounded(x.float() / scale, dtype), None, scale)


@reference("fp8_columns")
def round_columns_reference(x: Tensor, dtype: torch.dtype) -> Rounded:
    """In plain torch."""
    turned = round_rows_reference(x.t().contiguous(), dtype)
    return Rounded(None, turned.rows, turned.scale)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _turns(x: Tensor) -> bool:
    """Whether the kernel can turn such a matrix: what Triton makes of float32 has wrong bytes in the transpose."""
    return takes(x) and (x.dtype in _NARROW or x.device.type == "cpu")


@torch.no_grad()
def round_tensor_triton(
    x: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True, scale: Tensor | None = None
) -> Rounded:
    """By the kernels where they can."""
    if not _turns(x) or not x.numel():
        return round_tensor_reference(x, dtype, rows=rows, columns=columns, scale=scale)
    from deepspeed.ops.fp8.kernels.quantise import largest, round_both

    if scale is not None:
        return Rounded(*round_both(x, scale, dtype, rows=rows, columns=columns), scale)
    found = largest(x)
    made = torch.empty_like(found)
    both = round_both(x, found, dtype, rows=rows, columns=columns, made=made, smallest=SMALLEST)
    return Rounded(*both, made)


@torch.no_grad()
def round_rows_triton(x: Tensor, dtype: torch.dtype) -> Rounded:
    """By the kernel where it can."""
    if not takes_rows(x):
        return round_rows_reference(x, dtype)
    from deepspeed.ops.fp8.kernels.quantise import round_rows as kernel

    rounded, scale = kernel(x, dtype, SMALLEST)
    return Rounded(rounded, None, scale)


@torch.no_grad()
def round_columns_triton(x: Tensor, dtype: torch.dtype) -> Rounded:
    """By the kernel where it can."""
    if not _turns(x) or not x.numel():
        return round_columns_reference(x, dtype)
    from deepspeed.ops.fp8.kernels.quantise import round_both

    scale = x.abs().amax(0).float().clamp_(min=SMALLEST).div_(torch.finfo(dtype).max)
    return Rounded(*round_both(x, scale, dtype, rows=False, columns=True), scale.unsqueeze(1))


@implementation("fp8_tensor", name="triton", requires=has_triton & on_cuda, rank=20)
def _load_tensor() -> Callable[..., Rounded]:
    return round_tensor_triton


@implementation("fp8_rows", name="triton", requires=has_triton & on_cuda, rank=20)
def _load_rows() -> Callable[..., Rounded]:
    return round_rows_triton


@implementation("fp8_columns", name="triton", requires=has_triton & on_cuda, rank=20)
def _load_columns() -> Callable[..., Rounded]:
    return round_columns_triton
