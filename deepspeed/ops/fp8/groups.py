"""Numbers rounded to 8 bits with many scales: one for each row, for 128 numbers of a row, or for a square of 128 × 128.

Ops `fp8_groups`, and `fp8_gated` and `fp8_gated_slopes` for what feed-forward layers compute between their products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.fp8.quantise import SMALLEST, Quantized, rounded, turns
from deepspeed.ops.model.gated import halves, halves_slopes
from deepspeed.ops.registry import by_triton, op, reference

SIDE = 128

Form = Literal["row", "strip", "square"]
"""What has a scale of its own: a row; 128 numbers of a row; a square with sides of 128."""

Forms = tuple[Form, Form]
"""Of a matrix and of its transpose: of rows in both or in none."""


def round_groups(
    matrices: Sequence[Tensor], dim: int, dtype: torch.dtype, forms: Forms, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """A matrix rounded in the layouts that are asked for; rows of the transpose have scales of their own.

    It is given in parts that are one below the other (`dim` 0) or side by side (1).
    """
    joined = [x.contiguous() for x in matrices]
    result: Quantized = op("fp8_groups")(joined, dim, dtype, forms, rows=rows, columns=columns)
    return result


def round_gated(both: Tensor, kind: str, dtype: torch.dtype, forms: Forms, *, columns: bool = True) -> Quantized:
    """act(gate) · up of gate and up side by side, rounded; `kind` is that of the activation."""
    result: Quantized = op("fp8_gated")(both, kind, dtype, forms, columns=columns)
    return result


def round_slopes(
    grad: Tensor, both: Tensor, kind: str, dtype: torch.dtype, forms: Forms, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """The gradient of `both` for that of act(gate) · up, rounded."""
    result: Quantized = op("fp8_gated_slopes")(grad, both, kind, dtype, forms, rows=rows, columns=columns)
    return result


def spread(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """The scale of each number of a matrix."""
    for dim, size in enumerate(shape):
        if scale.shape[dim] != size:
            times = size if scale.shape[dim] == 1 else SIDE
            scale = scale.repeat_interleave(times, dim).narrow(dim, 0, size)
    return scale


def scales(shape: Sequence[int], form: Form, device: torch.device) -> Tensor:
    """Memory for the scales of a matrix, laid out as torch's products of scaled numbers want it."""
    lines, groups = shape[0], -(-shape[1] // SIDE)
    if form == "row":
        return torch.empty(lines, 1, dtype=torch.float32, device=device)
    if form == "strip":
        return torch.empty(groups, lines, dtype=torch.float32, device=device).t()
    lines, padded = -(-lines // SIDE), -(-groups // 4) * 4
    return torch.empty(lines, padded, dtype=torch.float32, device=device).narrow(1, 0, groups)


@reference("fp8_groups")
@torch.no_grad()
def round_groups_reference(
    matrices: Sequence[Tensor], dim: int, dtype: torch.dtype, forms: Forms, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """In plain torch."""
    x = matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), dim)
    (codes, scale), (turned, turned_scale) = _round(x, dtype, forms[0], rows), _round(x.t(), dtype, forms[1], columns)
    return Quantized(codes, turned, scale, turned_scale)


def _round(x: Tensor, dtype: torch.dtype, form: Form, asked: bool) -> tuple[Tensor | None, Tensor]:
    if not asked:
        return None, scales(x.shape, form, x.device)
    height, width = x.shape
    down, across = {"row": (1, max(width, 1)), "strip": (1, SIDE), "square": (SIDE, SIDE)}[form]
    padded = functional.pad(x.abs(), (0, -width % across, 0, -height % down))
    groups = padded.view(padded.shape[0] // down, down, padded.shape[1] // across, across)
    largest = groups.float().amax((1, 3)).clamp_(min=SMALLEST) if x.numel() else x.new_ones(groups.shape[::2]).float()
    limit = torch.finfo(dtype).max
    scale = scales(x.shape, form, x.device).copy_(largest / limit)
    return rounded(x.float() * spread(limit / largest, x.shape), dtype).contiguous(), scale


@reference("fp8_gated")
@torch.no_grad()
def round_gated_reference(
    both: Tensor, kind: str, dtype: torch.dtype, forms: Forms, *, columns: bool = True
) -> Quantized:
    """The layer's numbers first, in memory."""
    return round_groups([halves(both, kind)], 0, dtype, forms, columns=columns)


@reference("fp8_gated_slopes")
@torch.no_grad()
def round_slopes_reference(
    grad: Tensor, both: Tensor, kind: str, dtype: torch.dtype, forms: Forms, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """The gradients first, in memory."""
    return round_groups([halves_slopes(grad, both, kind)[0]], 0, dtype, forms, rows=rows, columns=columns)


@by_triton("fp8_groups")
@torch.no_grad()
def round_groups_triton(
    matrices: Sequence[Tensor], dim: int, dtype: torch.dtype, forms: Forms, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """By the kernels where they can."""
    if not all(turns(x) and x.numel() for x in matrices):
        return round_groups_reference(matrices, dim, dtype, forms, rows=rows, columns=columns)
    if any(x.shape[dim] % SIDE for x in matrices[:-1]):  # groups would lie across parts
        matrices = [torch.cat(list(matrices), dim)]
    from deepspeed.ops.fp8.kernels.groups import round_groups

    sides, other = [x.shape[dim] for x in matrices], matrices[0].shape[1 - dim]
    shape = (sum(sides), other) if dim == 0 else (other, sum(sides))
    made = _memory(shape, dtype, forms, matrices[0].device, rows=rows, columns=columns)
    round_groups(list(zip(matrices, _split(made, dim, sides), strict=True)), dim, made, forms)
    return made


@by_triton("fp8_gated")
@torch.no_grad()
def round_gated_triton(both: Tensor, kind: str, dtype: torch.dtype, forms: Forms, *, columns: bool = True) -> Quantized:
    """By one kernel where it can."""
    if not turns(both) or not both.numel():
        return round_gated_reference(both, kind, dtype, forms, columns=columns)
    from deepspeed.ops.fp8.kernels.groups import gated_forward

    made = _memory((len(both), both.shape[1] // 2), dtype, forms, both.device, columns=columns)
    gated_forward(both.contiguous(), made, kind, forms)
    return made


@by_triton("fp8_gated_slopes")
@torch.no_grad()
def round_slopes_triton(
    grad: Tensor, both: Tensor, kind: str, dtype: torch.dtype, forms: Forms, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """By one kernel where it can."""
    if not turns(both) or not both.numel() or both.shape[1] % (2 * SIDE):
        return round_slopes_reference(grad, both, kind, dtype, forms, rows=rows, columns=columns)
    from deepspeed.ops.fp8.kernels.groups import gated_backward

    made = _memory(tuple(both.shape), dtype, forms, both.device, rows=rows, columns=columns)
    gated_backward(grad.contiguous(), both.contiguous(), made, kind, forms)
    return made


def _memory(
    shape: tuple[int, ...], dtype: torch.dtype, forms: Forms, device: torch.device, *, rows: bool = True, columns: bool
) -> Quantized:
    turned = shape[::-1]
    return Quantized(
        torch.empty(shape, dtype=dtype, device=device) if rows else None,
        torch.empty(turned, dtype=dtype, device=device) if columns else None,
        scales(shape, forms[0], device),
        scales(turned, forms[1], device),
    )


def _split(whole: Quantized, dim: int, sides: Sequence[int]) -> list[Quantized]:
    """Parts of the memory of a matrix, of these sides."""

    def cut(x: Tensor | None, axis: int) -> Sequence[Tensor | None]:
        if x is None or len(sides) == 1:
            return [x] * len(sides)
        if x.shape[axis] == sum(sides):
            return x.split(list(sides), axis)
        if x.shape[axis] == 1:  # of rows, which all parts share
            return [x] * len(sides)
        return x.split([-(-side // SIDE) for side in sides], axis)

    rows, scale = cut(whole.rows, dim), cut(whole.scale, dim)
    columns, turned = cut(whole.columns, 1 - dim), cut(whole.turned, 1 - dim)
    return [Quantized(*each) for each in zip(rows, columns, scale, turned, strict=True)]  # type: ignore[arg-type]
