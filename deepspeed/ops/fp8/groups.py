"""Numbers rounded to 8 bits with many scales: one for each row, for 128 numbers of a row, or for a square of 128 × 128.

Op `fp8_groups`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.capability import has_e4m3
from deepspeed.ops.fp8.quantise import SIDE, SMALLEST, Form, Forms, Quantized, rounded, turns
from deepspeed.ops.model.linear import takes_rows
from deepspeed.ops.registry import by_triton, op, reference


def round_groups(
    matrices: Sequence[Tensor], dim: int, dtype: torch.dtype, forms: Forms, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """A matrix rounded in the layouts that are asked for; rows of the transpose have scales of their own.

    It is given in parts that are one below the other (`dim` 0) or side by side (1).
    """
    joined = [x.contiguous() for x in matrices]
    result: Quantized = op("fp8_groups")(joined, dim, dtype, forms, rows=rows, columns=columns)
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
    x = matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), dim)
    (codes, scale), (turned, turned_scale) = _round(x, dtype, forms[0], rows), _round(x.t(), dtype, forms[1], columns)
    one = scale if turned_scale is None else turned_scale
    assert one is not None, "one of them is asked for"
    return Quantized(codes, turned, one if scale is None else scale, one)


def _round(x: Tensor, dtype: torch.dtype, form: Form, asked: bool) -> tuple[Tensor | None, Tensor | None]:
    if not asked:
        return None, None
    height, width = x.shape
    down, across = {"row": (1, max(width, 1)), "strip": (1, SIDE), "square": (SIDE, SIDE)}[form]
    padded = functional.pad(x.abs(), (0, -width % across, 0, -height % down))
    groups = padded.view(padded.shape[0] // down, down, padded.shape[1] // across, across)
    largest = groups.float().amax((1, 3)).clamp_(min=SMALLEST) if x.numel() else x.new_ones(groups.shape[::2]).float()
    limit = torch.finfo(dtype).max
    scale = scales(x.shape, form, x.device).copy_(largest / limit)
    return rounded(x.float() * spread(limit / largest, x.shape), dtype).contiguous(), scale


@by_triton("fp8_groups", has_e4m3)
@torch.no_grad()
def round_groups_triton(
    matrices: Sequence[Tensor], dim: int, dtype: torch.dtype, forms: Forms, *, rows: bool = True, columns: bool = True
) -> Quantized:
    if not all(turns(x) and x.numel() for x in matrices):
        return round_groups_reference(matrices, dim, dtype, forms, rows=rows, columns=columns)
    if any(x.shape[dim] % SIDE for x in matrices[:-1]):  # groups would lie across parts
        matrices = [torch.cat(list(matrices), dim)]
    from deepspeed.ops.fp8.kernels.groups import round_groups

    if forms[0] == "row" and not columns and dim == 0 and all(map(takes_rows, matrices)):
        return _round_rows(matrices, dtype)
    sides, other = [x.shape[dim] for x in matrices], matrices[0].shape[1 - dim]
    shape = (sum(sides), other) if dim == 0 else (other, sum(sides))
    made = _memory(shape, dtype, forms, matrices[0].device, rows=rows, columns=columns)
    round_groups(list(zip(matrices, _split(made, dim, sides), strict=True)), dim, made, forms)
    return made


def _round_rows(matrices: Sequence[Tensor], dtype: torch.dtype) -> Quantized:
    """Rows alone, in one pass over memory."""
    from deepspeed.ops.fp8.kernels.quantise import round_rows

    sides, device = [len(x) for x in matrices], matrices[0].device
    codes = torch.empty(sum(sides), matrices[0].shape[1], dtype=dtype, device=device)
    scale = scales(codes.shape, "row", device)
    for x, part, part_scale in zip(matrices, codes.split(sides), scale.split(sides), strict=True):
        round_rows(x, part, part_scale, SMALLEST)
    return Quantized(codes, None, scale, scale)


def _memory(
    shape: tuple[int, ...], dtype: torch.dtype, forms: Forms, device: torch.device, *, rows: bool, columns: bool
) -> Quantized:
    made = [
        (torch.empty(side, dtype=dtype, device=device), scales(side, form, device)) if asked else (None, None)
        for side, form, asked in zip((shape, shape[::-1]), forms, (rows, columns), strict=True)
    ]
    (row, scale), (column, turned) = made
    one = scale if turned is None else turned
    assert one is not None, "one of them is asked for"
    return Quantized(row, column, one if scale is None else scale, one)


def _split(whole: Quantized, dim: int, sides: Sequence[int]) -> list[Quantized]:
    """Parts of the memory of a matrix, of these sides."""

    def cut(codes: Tensor | None, scale: Tensor, axis: int) -> list[tuple[Tensor | None, Tensor]]:
        if codes is None or len(sides) == 1:
            return [(codes, scale)] * len(sides)
        sizes = [-(-side // SIDE) for side in sides] if scale.shape[axis] != codes.shape[axis] else list(sides)
        shared = scale.shape[axis] == 1  # of whole rows
        parts = [scale] * len(sides) if shared else scale.split(sizes, axis)
        return list(zip(codes.split(list(sides), axis), parts, strict=True))

    rows, columns = cut(whole.rows, whole.scale, dim), cut(whole.columns, whole.turned, 1 - dim)
    pairs = zip(rows, columns, strict=True)
    return [Quantized(row, column, scale, turned) for (row, scale), (column, turned) in pairs]
