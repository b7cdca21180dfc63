"""Rounding to 8 bits with many scales: a program writes a tile in both layouts, and its scales.

What shares a scale lies within a tile of 128 × 128. Where that are whole rows and columns, a pass over memory finds
their largest magnitudes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.fp8.kernels.quantise import TYPES
from deepspeed.ops.fp8.quantise import SIDE, SMALLEST, Forms, Quantized
from deepspeed.ops.model.kernels.common import cdiv
from deepspeed.ops.precompile import launch

TILES: dict[str, tuple[int, int, int]] = {"row": (32, 128, 4), "strip": (SIDE, SIDE, 4), "square": (SIDE, SIDE, 8)}
"""Rows and columns that a program rounds, and its warps, by the form of rows."""
MEASURED = 32, 256, 256, 8
"""Rows and columns that a program looks through at a time, its rows in all, and its warps."""
_FORMS = {"row": 0, "strip": 1, "square": 2}


@triton.jit
def _load(x_ptr, top, left, rows, columns, stride, DOWN: tl.constexpr, RIGHT: tl.constexpr):
    down, right = tl.arange(0, DOWN), tl.arange(0, RIGHT)
    inside = (down[:, None] < rows - top) & (right[None, :] < columns - left)
    at = x_ptr + (top * stride + left) + (down[:, None] * stride + right[None, :])
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _write(
    codes, most, out_ptr, scale_ptr, top, left, rows, columns, height, width, limit,
    FORM: tl.constexpr, SIDE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    # A tile of one layout, and the scales of its rows, whose largest magnitudes are known. A part of rows × columns
    # lies in the memory of a matrix of height × width; strides follow from this, as `scales` in groups.py has them.
    down, right = tl.arange(0, DOWN), tl.arange(0, RIGHT)
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
def _most(
    x, most_ptr, start, size, smallest, AXIS: tl.constexpr, FORM: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    # The largest magnitude of what shares a scale, for each row (axis 1) or column (0) of a tile.
    at = tl.arange(0, LINES)
    if FORM == 0:
        most = tl.load(most_ptr + start + at, mask=at < size - start, other=0.0)
    else:
        most = tl.max(tl.abs(x), axis=AXIS)
    if FORM == 2:
        most = tl.max(most, axis=0) + tl.zeros((LINES,), dtype=tl.float32)
    return tl.maximum(most, smallest)


@triton.jit
def _write_both(
    x, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, top, left, rows, columns,
    height, width, limit, smallest, TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    # ROWS and COLUMNS: the form of each layout, -1 for none. No number exceeds the limit by more than rounding does.
    if ROWS >= 0:
        most = _most(x, row_most_ptr, top, rows, smallest, 1, ROWS, DOWN)
        codes = (x * tl.div_rn(limit, most)[:, None]).to(TYPE)
        _write(
            codes, most, row_ptr, row_scale_ptr, top, left, rows, columns, height, width, limit,
            ROWS, SIDE, DOWN, RIGHT,
        )  # fmt: skip
    if COLUMNS >= 0:
        most = _most(x, column_most_ptr, left, columns, smallest, 0, COLUMNS, RIGHT)
        codes = (x * tl.div_rn(limit, most)[None, :]).to(TYPE)
        _write(
            tl.trans(codes), most, column_ptr, column_scale_ptr, left, top, columns, rows, width, height, limit,
            COLUMNS, SIDE, RIGHT, DOWN,
        )  # fmt: skip


@triton.jit
def _round(
    x_ptr, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, rows, columns,
    height, width, limit, smallest, TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SIDE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    top, left = tl.program_id(0).to(tl.int64) * DOWN, tl.program_id(1).to(tl.int64) * RIGHT
    x = _load(x_ptr, top, left, rows, columns, columns, DOWN, RIGHT).to(tl.float32)
    _write_both(
        x, row_most_ptr, column_most_ptr, row_ptr, column_ptr, row_scale_ptr, column_scale_ptr, top, left, rows,
        columns, height, width, limit, smallest, TYPE, ROWS, COLUMNS, SIDE, DOWN, RIGHT,
    )  # fmt: skip


@triton.jit
def _largest(
    x_ptr, row_ptr, column_ptr, rows, columns, DOWN: tl.constexpr, RIGHT: tl.constexpr, ALL: tl.constexpr
):  # fmt: skip
    first, left = tl.program_id(0).to(tl.int64) * ALL, tl.program_id(1).to(tl.int64) * RIGHT
    down, right = tl.arange(0, DOWN), tl.arange(0, RIGHT)
    found = tl.zeros((DOWN, RIGHT), dtype=tl.float32)
    for start in range(0, ALL, DOWN):
        top = first + start
        x = tl.abs(_load(x_ptr, top, left, rows, columns, columns, DOWN, RIGHT).to(tl.float32))
        found = tl.maximum(found, x)
        tl.atomic_max(row_ptr + top + down, tl.max(x, axis=1), mask=down < rows - top)
    tl.atomic_max(column_ptr + left + right, tl.max(found, axis=0), mask=right < columns - left)


def round_groups(parts: Sequence[tuple[Tensor, Quantized]], dim: int, whole: Quantized, forms: Forms) -> None:
    """Write contiguous parts of a matrix in 8 bits, in the layouts for which there is memory."""
    most = _magnitudes(parts, dim, whole) if forms[0] == "row" else ()
    down, right, num_warps = TILES[forms[0]]
    start = 0
    for x, into in parts:
        lines = [each[start:] if axis == dim else each for axis, each in enumerate(most)]
        row, column = _codes(into)
        launch(
            _round, (cdiv(x.shape[0], down), cdiv(x.shape[1], right)),
            x, *(lines or (into.scale, into.turned)), row, column, into.scale, into.turned, *x.shape, *_shape(whole),
            torch.finfo(row.dtype).max, SMALLEST,
            TYPE=TYPES[row.dtype], **_kinds(into, forms), SIDE=SIDE, DOWN=down, RIGHT=right, num_warps=num_warps,
        )  # fmt: skip
        start += x.shape[dim]


def _magnitudes(parts: Sequence[tuple[Tensor, Quantized]], dim: int, whole: Quantized) -> Sequence[Tensor]:
    """The largest magnitudes of the rows and of the columns of a matrix."""
    shape = list(_shape(whole))
    row, column = torch.zeros(sum(shape), dtype=torch.float32, device=whole.scale.device).split(shape)
    down, right, most, num_warps = MEASURED
    start = 0
    for x, _ in parts:
        places = (row[start:], column) if dim == 0 else (row, column[start:])
        launch(
            _largest, (cdiv(x.shape[0], most), cdiv(x.shape[1], right)),
            x, *places, *x.shape, DOWN=down, RIGHT=right, ALL=most, num_warps=num_warps,
        )  # fmt: skip
        start += x.shape[dim]
    return row, column


def _kinds(into: Quantized, forms: Forms) -> dict[str, int]:
    made = into.rows, into.columns
    rows, columns = (-1 if each is None else _FORMS[form] for each, form in zip(made, forms, strict=True))
    return {"ROWS": rows, "COLUMNS": columns}


def _codes(into: Quantized) -> tuple[Tensor, Tensor]:
    row, column = into.rows if into.rows is not None else into.columns, into.columns
    assert row is not None, "one of them is asked for"
    return row, row if column is None else column


def _shape(into: Quantized) -> Sequence[int]:
    if into.rows is not None:
        return into.rows.shape
    assert into.columns is not None, "one of them is asked for"
    return into.columns.shape[::-1]
