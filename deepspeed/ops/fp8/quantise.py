"""Numbers rounded to 8 bits with a scale: one for a whole tensor, or one for each row. Ops `fp8_tensor`, `fp8_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deepspeed.ops.capability import has_e4m3
from deepspeed.ops.model.linear import takes, takes_rows
from deepspeed.ops.registry import by_triton, op, reference

_NARROW = (torch.bfloat16, torch.float16)

SMALLEST = 1e-12
"""A magnitude below which nothing is told apart from zero; the scale of zeros must not be 0."""


SIDE = 128

Form = Literal["row", "strip", "square"]
"""What has a scale of its own: a row; 128 numbers of a row; a square with sides of 128."""

Forms = tuple[Form, Form]
"""Of a matrix and of its transpose: of rows in both or in none."""


class Quantized(NamedTuple):
    """A matrix in 8 bits. Its values are those of `rows` times `scale`, or of the transpose times `turned`."""

    rows: Tensor | None
    """[m, n], contiguous; None where nobody asked for it."""
    columns: Tensor | None
    """[n, m], contiguous: the transpose."""
    scale: Tensor
    """float32: a scalar, or [m, 1] of the rows, or [m, n / 128] of their parts, or [m / 128, n / 128] of squares."""
    turned: Tensor
    """Those of the transpose."""


def round_tensor(
    x: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True, largest: Tensor | None = None
) -> Quantized:
    """A matrix rounded with one scale, by its largest magnitude, in the layouts that are asked for.

    A `largest` that is known spares a pass over the numbers.
    """
    result: Quantized = op("fp8_tensor")([x.contiguous()], 0, dtype, rows=rows, columns=columns, largest=largest)
    return result


def round_joined(
    matrices: Sequence[Tensor],
    dim: int,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    scale: Tensor | None = None,
) -> Quantized:
    """As `round_tensor`, of matrices that are one below the other (`dim` 0) or side by side (1), with one scale.

    A `scale` that is known from rounding the same numbers before spares a pass over them.
    """
    joined = [x.contiguous() for x in matrices]
    result: Quantized = op("fp8_tensor")(joined, dim, dtype, rows=rows, columns=columns, scale=scale)
    return result


def round_rows(x: Tensor, dtype: torch.dtype) -> Quantized:
    """A matrix rounded with a scale for each row."""
    result: Quantized = op("fp8_rows")(x.contiguous(), dtype)
    return result


@reference("fp8_tensor")
@torch.no_grad()
def round_tensor_reference(
    matrices: Sequence[Tensor],
    dim: int,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    scale: Tensor | None = None,
    largest: Tensor | None = None,
) -> Quantized:
    x = matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), dim)
    if scale is None:
        if largest is None:
            largest = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        scale = largest.clamp(min=SMALLEST) / torch.finfo(dtype).max
    codes = rounded(x.float() / scale, dtype)
    return Quantized(codes if rows else None, codes.t().contiguous() if columns else None, scale, scale)


@reference("fp8_rows")
@torch.no_grad()
def round_rows_reference(x: Tensor, dtype: torch.dtype) -> Quantized:
    largest = x.abs().amax(1, keepdim=True).float() if x.numel() else x.new_zeros(x.shape[0], 1, dtype=torch.float32)
    scale = largest.clamp(min=SMALLEST) / torch.finfo(dtype).max
    return Quantized(rounded(x.float() / scale, dtype), None, scale, scale)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of 8 bits."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def turns(x: Tensor) -> bool:
    """Whether the kernel can turn such a matrix: what Triton makes of float32 has wrong bytes in the transpose."""
    return takes(x) and (x.dtype in _NARROW or x.device.type == "cpu")


@by_triton("fp8_tensor", has_e4m3)
def round_tensor_triton(
    matrices: Sequence[Tensor],
    dim: int,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    scale: Tensor | None = None,
    largest: Tensor | None = None,
) -> Quantized:
    if not all(turns(x) and x.numel() for x in matrices):
        return round_tensor_reference(matrices, dim, dtype, rows=rows, columns=columns, scale=scale, largest=largest)
    from deepspeed.ops.fp8.kernels import quantise as kernels

    made = None
    if scale is None:
        scale = kernels.largest(matrices) if largest is None else largest
        made = torch.empty_like(scale)
    sides = [x.shape[dim] for x in matrices]
    height, width = (sum(sides), matrices[0].shape[1]) if dim == 0 else (matrices[0].shape[0], sum(sides))
    device = matrices[0].device
    row = torch.empty(height, width, dtype=dtype, device=device) if rows else None
    column = torch.empty(width, height, dtype=dtype, device=device) if columns else None
    start = 0
    for some in kernels.batched(matrices):
        side = sum(x.shape[dim] for x in some)
        into = row if row is None or side == sum(sides) else row.narrow(dim, start, side)
        turned = column if column is None or side == sum(sides) else column.narrow(1 - dim, start, side)
        kernels.round_joined(some, dim, scale, into, turned, made=made, smallest=SMALLEST)
        start += side
    used = scale if made is None else made
    return Quantized(row, column, used, used)


@torch.no_grad()
@by_triton("fp8_rows", has_e4m3)
def round_rows_triton(x: Tensor, dtype: torch.dtype) -> Quantized:
    if not takes_rows(x):
        return round_rows_reference(x, dtype)
    from deepspeed.ops.fp8.kernels.quantise import round_rows as kernel

    codes = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    kernel(x, codes, scale, SMALLEST)
    return Quantized(codes, None, scale, scale)
