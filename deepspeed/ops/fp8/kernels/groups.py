"""Rounding to 8 bits with many scales: a tile of 128 × 128 in one program, which writes both layouts and their scales.

Where scales are of whole rows, a pass over memory finds the largest magnitude of each row and column first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.fp8.groups import SIDE, Forms
from deepspeed.ops.fp8.kernels.quantise import TYPES
from deepspeed.ops.fp8.quantise import SMALLEST, Quantized
from deepspeed.ops.model.kernels.common import KINDS, act, cdiv
from deepspeed.ops.precompile import launch

WARPS, SLOPES_WARPS = 8, 16
_FORMS = {"row": 0, "strip": 1, "square": 2}
_Place = tuple[Any, tuple[int, int], list[Tensor], Quantized, Sequence[Tensor]]
"""A kernel, its programs, what it reads, what it writes, and the largest magnitudes of rows and columns, if any."""


@triton.jit
def _load(x_ptr, top, left, rows, columns, stride, SIDE: tl.constexpr):
    down, right = tl.arange(0, SIDE), tl.arange(0, SIDE)
    inside = (down[:, None] < rows - top) & (right[None, :] < columns - left)
    at = x_ptr + (top * stride + left) + (down[:, None] * stride + right[None, :])
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _write(
    codes, most, out_ptr, scale_ptr, top, left, rows, columns, height, width, limit,
    FORM: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    # A tile of one layout, and the scales of its rows, whose largest magnitudes are known. A part of rows × columns
    # lies in the memory of a matrix of height × width; strides follow from this, as `scales` in groups.py has them.
    down, right = tl.arange(0, SIDE), tl.arange(0, SIDE)
    inside = (down[:, None] < rows - top) & (right[None, :] < columns - left)
    tl.store(out_ptr + (top * width + left) + (down[:, None] * width + right[None, :]), codes, mask=inside)
    scale, group = tl.div_rn(most, limit), left // SIDE
    if FORM == 2:
        padded = tl.cdiv(width, 4 * SIDE) * 4
        tl.store(scale_ptr + top // SIDE * padded + group, tl.max(scale, axis=0))
    elif FORM == 1:
        tl.store(scale_ptr + top + down + group * height, scale, mask=down < rows - top)
    elif left == 0:
        tl.store(scale_ptr + top + down, scale, mask=down < rows - top)


@triton.jit
def _most(x, most_ptr, start, size, smallest, AXIS: tl.constexpr, FORM: tl.constexpr, SIDE: tl.constexpr):
    # The largest magnitude of what shares a scale, for each row (axis 1) or column (0) of a tile.
    at = tl.arange(0, SIDE)
    if FORM == 0:
        most = tl.load(most_ptr + start + at, mask=at < size - start, other=0.0)
    else:
        most = tl.max(tl.abs(x), axis=AXIS)
    if FORM == 2:
        most = tl.max(most, axis=0) + tl.zeros((SIDE,), dtype=tl.float32)
    return tl.maximum(most, smallest)


@triton.jit
def _finish(
    x, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, top, left, rows, columns,
    height, width, limit, smallest,
    TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MEASURES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    # ROWS and COLUMNS: the form of each layout, -1 for none. What `MEASURES` raises the magnitudes that form 0 reads.
    at = tl.arange(0, SIDE)
    if MEASURES:
        tl.atomic_max(row_most_ptr + top + at, tl.max(tl.abs(x), axis=1), mask=at < rows - top)
        tl.atomic_max(column_most_ptr + left + at, tl.max(tl.abs(x), axis=0), mask=at < columns - left)
    else:
        if ROWS >= 0:
            most = _most(x, row_most_ptr, top, rows, smallest, 1, ROWS, SIDE)
            codes = tl.minimum(tl.maximum(x * tl.div_rn(limit, most)[:, None], -limit), limit).to(TYPE)
            _write(
                codes, most, row_ptr, row_scale_ptr, top, left, rows, columns, height, width, limit, ROWS, SIDE,
            )  # fmt: skip
        if COLUMNS >= 0:
            most = _most(x, column_most_ptr, left, columns, smallest, 0, COLUMNS, SIDE)
            codes = tl.minimum(tl.maximum(x * tl.div_rn(limit, most)[None, :], -limit), limit).to(TYPE)
            _write(
                tl.trans(codes), most, column_ptr, column_scale_ptr, left, top, columns, rows, width, height, limit,
                COLUMNS, SIDE,
            )  # fmt: skip


@triton.jit
def _round(
    x_ptr, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, rows, columns,
    height, width, limit, smallest,
    TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MEASURES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    top, left = tl.program_id(0).to(tl.int64) * SIDE, tl.program_id(1).to(tl.int64) * SIDE
    x = _load(x_ptr, top, left, rows, columns, columns, SIDE).to(tl.float32)
    _finish(
        x, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, top, left, rows,
        columns, height, width, limit, smallest,
        TYPE, ROWS, COLUMNS, MEASURES, SIDE,
    )  # fmt: skip


@triton.jit
def _gated_forward(
    both_ptr, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, rows, columns,
    height, width, limit, smallest, KIND: tl.constexpr,
    TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MEASURES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    top, left = tl.program_id(0).to(tl.int64) * SIDE, tl.program_id(1).to(tl.int64) * SIDE
    gate = _load(both_ptr, top, left, rows, columns, 2 * columns, SIDE)
    up = _load(both_ptr + columns, top, left, rows, columns, 2 * columns, SIDE)
    value, _ = act(gate.to(tl.float32), KIND)
    y = (value * up.to(tl.float32)).to(gate.dtype).to(tl.float32)  # as where the kernel does not round
    _finish(
        y, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, top, left, rows,
        columns, height, width, limit, smallest,
        TYPE, ROWS, COLUMNS, MEASURES, SIDE,
    )  # fmt: skip


@triton.jit
def _gated_backward(
    dy_ptr, both_ptr, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, rows,
    columns, height, width, limit, smallest,
    KIND: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MEASURES: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    # Two programs for a tile of the layer, which lie next to each other: one for the gate, one for the other half.
    half = tl.program_id(0) % 2
    top, left = (tl.program_id(0) // 2).to(tl.int64) * SIDE, tl.program_id(1).to(tl.int64) * SIDE
    inner = columns // 2
    gate = _load(both_ptr, top, left, rows, inner, columns, SIDE)
    value, slope = act(gate.to(tl.float32), KIND)
    if half == 0:
        value = slope * _load(both_ptr + inner, top, left, rows, inner, columns, SIDE).to(tl.float32)
    x = _load(dy_ptr, top, left, rows, inner, inner, SIDE).to(tl.float32) * value
    x = x.to(gate.dtype).to(tl.float32)
    left += half * inner
    _finish(
        x, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, top, left, rows,
        columns, height, width, limit, smallest,
        TYPE, ROWS, COLUMNS, MEASURES, SIDE,
    )  # fmt: skip


def round_groups(parts: Sequence[tuple[Tensor, Quantized]], dim: int, whole: Quantized, forms: Forms) -> None:
    """Write contiguous parts of a matrix in 8 bits, in the layouts for which there is memory."""
    most, start, places = _magnitudes(whole, forms), 0, []
    for x, into in parts:
        lines = [each[start:] if axis == dim else each for axis, each in enumerate(most)]
        places.append((_round, _grid(x.shape), [x], into, lines))
        start += x.shape[dim]
    _launch(places, whole, forms, WARPS)


def gated_forward(both: Tensor, into: Quantized, kind: str, forms: Forms) -> None:
    """act(gate) · up in 8 bits, of gate and up side by side."""
    place = _gated_forward, _grid(_shape(into)), [both], into, _magnitudes(into, forms)
    _launch([place], into, forms, WARPS, KIND=KINDS[kind])


def gated_backward(dy: Tensor, both: Tensor, into: Quantized, kind: str, forms: Forms) -> None:
    """The gradients of gate and of up in 8 bits, side by side as these are, in whole tiles."""
    down, right = _grid(dy.shape)
    place = _gated_backward, (2 * down, right), [dy, both], into, _magnitudes(into, forms)
    _launch([place], into, forms, SLOPES_WARPS, KIND=KINDS[kind])


def _magnitudes(into: Quantized, forms: Forms) -> Sequence[Tensor]:
    """Zeros for the largest magnitudes of rows and columns, where scales are of these."""
    if forms[0] != "row":
        return ()
    sizes = [len(into.scale), len(into.turned)]
    return torch.zeros(sum(sizes), dtype=torch.float32, device=into.scale.device).split(sizes)


def _launch(places: Sequence[_Place], whole: Quantized, forms: Forms, num_warps: int, **options: Any) -> None:
    for measures in (True, False) if forms[0] == "row" else (False,):
        for kernel, grid, given, into, most in places:
            row, column = into.rows if into.rows is not None else into.columns, into.columns
            assert row is not None, "one of them is asked for"
            column = row if column is None else column
            launch(
                kernel, grid,
                *given, *(most or (into.scale, into.turned)), row, column, into.scale, into.turned,
                *_shape(into), *_shape(whole), torch.finfo(row.dtype).max, SMALLEST, **options,
                TYPE=TYPES[row.dtype], ROWS=_FORMS[forms[0]] if measures or into.rows is not None else -1,
                COLUMNS=_FORMS[forms[1]] if measures or into.columns is not None else -1, MEASURES=measures, SIDE=SIDE,
                num_warps=num_warps,
            )  # fmt: skip


def _shape(into: Quantized) -> Sequence[int]:
    if into.rows is not None:
        return into.rows.shape
    assert into.columns is not None, "one of them is asked for"
    return into.columns.shape[::-1]


def _grid(shape: Sequence[int]) -> tuple[int, int]:
    return cdiv(shape[0], SIDE), cdiv(shape[1], SIDE)
