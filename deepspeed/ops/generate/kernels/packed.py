"""Rows times a packed weight, which is widened in registers: [Note: packed layouts], [Note: streamed products]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.generate.kernels.streaming import (
    ProductTile,
    arrive,
    keep,
    parts_of,
    processors,
    put,
    scratch,
    together,
)
from deepspeed.ops.generate.packed_weight import UNIT, PackedWeight
from deepspeed.ops.model.kernels.common import after_others, cdiv, next_power, overlaps
from deepspeed.ops.precompile import launch

_MODES = {"w8a16": 8, "w4a16": 4, "wf6af16": 6, "fp8": 1}
_WIDEST = 64
"""Rows of x in a program."""


@triton.jit
def _x(x_ptr, x_row, row, rows, column, inner, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """[COUNT, rows] of x, turned."""
    at = column + tl.arange(0, COUNT)
    places = x_ptr + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * x_row + at[:, None]
    if WHOLE:
        x = tl.load(places)
    else:
        x = tl.load(places, mask=(at < inner)[:, None], other=0.0)
    return x


@triton.jit
def _four(code, zero, TYPE: tl.constexpr, ZEROS: tl.constexpr):
    """Numbers 0 to 15 less their zero: as the last bits of a power of two, which is subtracted with the zero."""
    if tl.bfloat16 == TYPE:
        large = (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        base = 128.0
    else:
        large = (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        base = 1024.0
    if ZEROS:
        small = large - (zero + base)[:, None].to(TYPE)
    else:
        small = large - tl.full((1, 1), base + 8.0, TYPE)
    return small


def _eight_fours(large: int, one: int, less: int, kind: str) -> str:
    """Code that makes pairs of the eight numbers of two words: 0 to 15 as the last bits of a power of two, less it."""
    lines = [f"mov.b32 one, {one * 65537:#x}; mov.b32 less, {less * 65537:#x};"]
    lines.append("prmt.b32 lo, $8, $9, 0x5410; prmt.b32 hi, $8, $9, 0x7632;")
    for k in range(8):
        half, shift = ("lo", "hi")[k // 4], 4 * (k % 4)
        lines.append(f"shr.b32 t, {half}, {shift};" if shift else f"mov.b32 t, {half};")
        lines.append(f"lop3.b32 t, t, 0x000f000f, {large * 65537:#x}, 0xea;")  # (a & b) | c
        lines.append(f"fma.rn.{kind}x2 ${k}, t, one, less;")
    return "{.reg .b32 lo, hi, t, one, less; " + " ".join(lines) + "}"


_PAIRS = tl.constexpr("=r," * 8 + "r,r")
_FOURS = tl.constexpr(_eight_fours(0x4300, 0x3F80, 0xC308, "bf16"))  # 128 + n, 1, -136
_FOURS16 = tl.constexpr(_eight_fours(0x6400, 0x3C00, 0xE408, "f16"))  # 1024 + n, 1, -1032


@triton.jit
def _fours(words, TYPE: tl.constexpr):
    """The eight numbers of each word, -8 to 7."""
    if tl.bfloat16 == TYPE:
        numbers = tl.inline_asm_elementwise(
            _FOURS, _PAIRS, [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )  # fmt: skip
    else:
        numbers = tl.inline_asm_elementwise(
            _FOURS16, _PAIRS, [words], dtype=(tl.float16,) * 8, is_pure=True, pack=2
        )  # fmt: skip
    return numbers


@triton.jit
def _six(low, high, TYPE: tl.constexpr):
    """Numbers of 6 bits, times 2^-12: as numbers of 16 bits whose exponents have the same low bits."""
    code = (low | (high << 4)).to(tl.int16)
    if tl.bfloat16 == TYPE:
        small = (((code & 32) << 10) | ((code & 31) << 5)).to(tl.bfloat16, bitcast=True)
        value = small * tl.full((1, 1), 5.192296858534828e33, TYPE)  # 2^112
    else:
        value = (((code & 32) << 10) | ((code & 31) << 8)).to(tl.float16, bitcast=True)
    return value


@triton.jit
def _unit(
    w_at, x_ptr, x_row, row, rows, column, inner, zero, total,
    MODE: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add what a unit of 128 columns gives; `w_at` is where each row has it."""
    type: tl.constexpr = x_ptr.dtype.element_ty
    if MODE <= 2:
        at = tl.arange(0, 128)[None, :]
        if WHOLE:
            w = tl.load(w_at[:, None] + at)
        else:
            w = tl.load(w_at[:, None] + at, mask=at < inner - column, other=0.0)
        x = _x(x_ptr, x_row, row, rows, column, inner, 128, WHOLE)
        if MODE == 1:  # float16, which 8-bit floats become faster than bfloat16
            x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)
            w = w.to(tl.float16)
        return tl.dot(w, x, total)  # of MODE 2 both are of 8 bits
    elif MODE == 8:
        w = tl.load(w_at[:, None] + tl.arange(0, 128)[None, :])
        w = (w ^ 128).to(tl.int8, bitcast=True).to(type)
        if ZEROS:
            w = w - zero[:, None].to(type)
        return tl.dot(w, _x(x_ptr, x_row, row, rows, column, inner, 128, WHOLE), total)
    elif MODE == 4:
        words = tl.load(w_at.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, 16)[None, :])
        if PDL and not ZEROS:
            numbers = _fours(words, type)
            for k in tl.static_range(8):
                x = _x(x_ptr, x_row, row, rows, column + 16 * k, inner, 16, WHOLE)
                total = tl.dot(numbers[k], x, total)
        else:
            for k in tl.static_range(8):
                w = _four((words >> (4 * k)) & 15, zero, type, ZEROS)
                total = tl.dot(w, _x(x_ptr, x_row, row, rows, column + 16 * k, inner, 16, WHOLE), total)
        return total
    else:
        at = tl.arange(0, 32)[None, :]
        first, second, bits = (
            tl.load(w_at[:, None] + at), tl.load(w_at[:, None] + 32 + at), tl.load(w_at[:, None] + 64 + at)
        )  # fmt: skip
        x = _x(x_ptr, x_row, row, rows, column, inner, 32, WHOLE)
        total = tl.dot(_six(first & 15, bits & 3, type), x, total)
        x = _x(x_ptr, x_row, row, rows, column + 32, inner, 32, WHOLE)
        total = tl.dot(_six(second & 15, (bits >> 2) & 3, type), x, total)
        x = _x(x_ptr, x_row, row, rows, column + 64, inner, 32, WHOLE)
        total = tl.dot(_six(first >> 4, (bits >> 4) & 3, type), x, total)
        x = _x(x_ptr, x_row, row, rows, column + 96, inner, 32, WHOLE)
        return tl.dot(_six(second >> 4, bits >> 6, type), x, total)


@triton.jit
def units(
    w_ptr, w_row, line, scales_ptr, zeros_ptr, x_ptr, x_row, row, rows, inner, groups, per_group, begin, end,
    MODE: tl.constexpr, BYTES: tl.constexpr, GROUPED: tl.constexpr, ZEROS: tl.constexpr, OUT: tl.constexpr,
    ROWS: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[OUT, ROWS] float32: lines of a packed weight times rows of x, over the units [begin, end)."""
    w_at = w_ptr + line.to(tl.int64) * w_row
    total = tl.zeros((OUT, ROWS), dtype=tl.float32)
    offset: tl.constexpr = 128.0 if MODE == 8 else 0.0
    group = line * groups + (begin // per_group if GROUPED else 0)
    scale, zero = tl.load(scales_ptr + group), line.to(tl.float32)
    if ZEROS:
        zero = tl.load(zeros_ptr + group).to(tl.float32) - offset
    for step in range(begin, end):
        if GROUPED:
            # What the next step needs is on its way while this one computes.
            later = line * groups + tl.minimum((step + 1) // per_group, groups - 1)
            next_scale = tl.load(scales_ptr + later)
            next_zero = tl.load(zeros_ptr + later).to(tl.float32) - offset if ZEROS else zero
            none = tl.zeros((OUT, ROWS), dtype=tl.float32)
            found = _unit(
                w_at + step * BYTES, x_ptr, x_row, row, rows, step * 128, inner, zero, none, MODE, ZEROS, WHOLE, PDL
            )  # fmt: skip
            total += found * scale.to(tl.float32)[:, None]
            scale, zero = next_scale, next_zero
        else:
            total = _unit(
                w_at + step * BYTES, x_ptr, x_row, row, rows, step * 128, inner, zero, total, MODE, ZEROS, WHOLE, PDL
            )  # fmt: skip
    if not GROUPED:
        total *= scale.to(tl.float32)[:, None]
    if MODE == 6:
        total *= 4096.0
    return total


@triton.jit
def _packed(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, partial_ptr, counters_ptr,
    rows, inner, outs, x_row, w_row, groups, per_group, steps,
    MODE: tl.constexpr, BYTES: tl.constexpr, GROUPED: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    PARTS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    turn = tl.program_id(1)
    first, top = tile * OUT, turn * ROWS
    out, row = first + tl.arange(0, OUT), top + tl.arange(0, ROWS)
    line = tl.minimum(out, outs - 1)
    begin = part * steps
    end = tl.minimum(begin + steps, tl.cdiv(inner, 128))
    after_others(PDL)
    total = units(
        w_ptr, w_row, line, scales_ptr, zeros_ptr, x_ptr, x_row, row, rows, inner, groups, per_group, begin, end,
        MODE, BYTES, GROUPED, ZEROS, OUT, ROWS, WHOLE, PDL,
    )  # fmt: skip
    if MODE == 2:
        total *= tl.load(zeros_ptr + row, mask=row < rows, other=0.0)[None, :]
    last = part >= 0
    if PARTS > 1:
        keep(partial_ptr, tile, part, total, PARTS, OUT, ROWS)
        last = arrive(counters_ptr, tile, PARTS)
    if last:
        if PARTS > 1:
            total = together(partial_ptr, tile, PARTS, OUT, ROWS)
        put(y_ptr + top.to(tl.int64) * outs, bias_ptr, total, first, rows - top, outs, BIAS, OUT, ROWS)


def form(packed: PackedWeight) -> dict[str, int]:
    """How `units` finds the numbers of a weight."""
    mode = _MODES[packed.mode]
    width = UNIT * (8 if packed.mode == "fp8" else mode) // 8
    return {"MODE": mode, "BYTES": width, "GROUPED": packed.group_size > 0, "ZEROS": packed.zeros is not None}


def groups_of(packed: PackedWeight) -> tuple[int, int]:
    """(groups of a row, units of a group)."""
    return packed.scales.shape[1], max(1, packed.group_size // UNIT)


def multiply(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, tile: ProductTile | None = None,
    x_scale: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """[rows, out]: x [rows, in] times the transpose of a packed weight; with `x_scale` x is in 8 bits as well."""
    rows, inner = x.shape
    if tile is None:
        wide = rows == 1 and packed.mode in ("w4a16", "w8a16")  # what x costs is shared by more rows of the weight
        tile = ProductTile(out=128 if wide else 64, stages=6 if packed.mode == "fp8" else 4)
    x = x if x.stride(1) == 1 and x.stride(0) % 16 == 0 else x.contiguous()
    outs = packed.shape[0]
    found = torch.empty(rows, outs, dtype=dtype or x.dtype, device=x.device)
    narrow = max(16, min(_WIDEST, next_power(rows)))
    tiles, turns = cdiv(outs, tile.out), cdiv(rows, narrow)
    count = cdiv(inner, UNIT)
    parts, steps = parts_of(tiles, count, processors(x.device)) if turns == 1 else (1, count)
    zeros = x_scale if packed.zeros is None else packed.zeros
    launch(
        _packed, (tiles * parts, turns),
        x, packed.data, packed.scales, packed.data if zeros is None else zeros,
        found if bias is None else bias, found, *scratch(tiles, parts, tile, narrow, x),
        rows, inner, outs, x.stride(0), packed.data.stride(0), *groups_of(packed),
        steps,
        **(form(packed) | ({} if x_scale is None else {"MODE": 2})), BIAS=bias is not None, PARTS=parts,
        OUT=tile.out, ROWS=narrow, WHOLE=inner % UNIT == 0, num_warps=tile.warps, num_stages=tile.stages,
        **overlaps(x.device),
    )  # fmt: skip
    return found
