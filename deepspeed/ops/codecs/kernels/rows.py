"""Blocks of a row and their codes: a program encodes, or decodes and adds up, some thousand neighbouring elements.

Products and sums are not fused, so that bits equal those of the references.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.codecs.formats import Format, Place
from deepspeed.ops.model.kernels.common import cdiv
from deepspeed.ops.precompile import launch

SPAN, SPAN_WARPS = 4096, 4
"""Elements of a program, and its warps."""
ROUND = tl.constexpr(12582912.0)
"""What a float32 of few digits is added to, so that its last bits are the nearest integer, ties to even."""

_KINDS = {"int8": 0, "int4": 1, "fp8_e4m3": 2, "fp8_e5m2": 3}
"""How a number is written; 4: a small float of FRACTION and BIAS."""


@triton.jit
def _top(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _code(x, inverse, KIND: tl.constexpr, BITS: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """int32 codes."""
    x = x.to(tl.float32) * inverse
    if KIND == 0:
        return (x + ROUND).to(tl.int32, bitcast=True) & 0xFF
    elif KIND == 1:
        return (x + ROUND).to(tl.int32, bitcast=True) & 0xF
    elif KIND == 2:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif KIND == 3:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        DROP: tl.constexpr = 23 - FRACTION
        rounded = (magnitude + ((1 << (DROP - 1)) - 1) + ((magnitude >> DROP) & 1)) >> DROP
        normal = rounded - ((127 - BIAS) << FRACTION)
        small = tl.minimum(tl.abs(x), 2.0 ** (13 - BIAS - FRACTION)) * (2.0 ** (BIAS - 1 + FRACTION))
        small = (small + ROUND).to(tl.int32, bitcast=True) & 0xFFFF
        code = tl.where(normal < (1 << FRACTION), small, normal)
        return code | (((bits >> 31) & 1) << (BITS - 1))


@triton.jit
def _value(code, KIND: tl.constexpr, BITS: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """float32 numbers of int32 codes."""
    if KIND == 0:  # integers become floats as the last bits of 2^23: converting them takes four times as long
        return ((code ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    elif KIND == 1:
        return ((code ^ 0x8) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    elif KIND == 2:
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == 3:
        return code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        magnitude = code & ((1 << (BITS - 1)) - 1)
        normal = ((magnitude << (23 - FRACTION)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        small = magnitude.to(tl.float32) * (2.0 ** (1 - BIAS - FRACTION))
        value = tl.where(magnitude < (1 << FRACTION), small, normal)
        return tl.where(((code >> (BITS - 1)) & 1) == 1, -value, value)


@triton.jit
def _lane(x_ptr, at, lane, group, length, q):
    """A lane of blocks; a block's last lanes may end early."""
    return tl.load(x_ptr + at + (lane * group + q), mask=(q < group) & (lane * group + q < length), other=0.0)


@triton.jit
def _put(x_ptr, at, lane, group, length, q, value):
    mask = (q < group) & (lane * group + q < length)
    tl.store(x_ptr + at + (lane * group + q), value.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _byte(payload_ptr, at, plane, group, q):
    return tl.load(payload_ptr + at + (plane * group + q), mask=q < group, other=0).to(tl.int32)


@triton.jit
def _put_byte(payload_ptr, at, plane, group, q, code):
    tl.store(payload_ptr + at + (plane * group + q), code.to(tl.uint8), mask=q < group)


@triton.jit
def _encode_blocks(
    x_ptr, payload_ptr, scale_ptr, left, group, count, share, smallest,
    KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, SPAN // BLOCK)[:, None]
    q = tl.arange(0, BLOCK // LANES)[None, :]
    at, length = r * BLOCK, left - r * BLOCK
    a = _lane(x_ptr, at, 0, group, length, q)
    top = _top(a)
    b = a
    if LANES > 1:
        b = _lane(x_ptr, at, 1, group, length, q)
        top = tl.maximum(top, _top(b))
    c, d = a, a
    if LANES > 2:
        c = _lane(x_ptr, at, 2, group, length, q)
        d = _lane(x_ptr, at, 3, group, length, q)
        top = tl.maximum(top, tl.maximum(_top(c), _top(d)))
    scale = tl.max(top, axis=1).to(tl.float32, bitcast=True) * share
    scale = tl.where(scale < smallest, 0.0, scale)
    blocks = tl.arange(0, SPAN // BLOCK)
    tl.store(scale_ptr + blocks, scale, mask=blocks < count)
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(scale > 0, tl.div_rn(one, tl.where(scale > 0, scale, 1.0)), 0.0)[:, None]
    to = r * (BLOCK // LANES * (LANES * BITS // 8))
    first = _code(a, inverse, KIND, BITS, FRACTION, BIAS)
    if LANES == 1:
        _put_byte(payload_ptr, to, 0, group, q, first)
    elif BITS == 4:
        second = _code(b, inverse, KIND, BITS, FRACTION, BIAS)
        _put_byte(payload_ptr, to, 0, group, q, first | (second << 4))
    elif BITS == 12:
        second = _code(b, inverse, KIND, BITS, FRACTION, BIAS)
        _put_byte(payload_ptr, to, 0, group, q, first)
        _put_byte(payload_ptr, to, 1, group, q, second)
        _put_byte(payload_ptr, to, 2, group, q, (first >> 8) | ((second >> 8) << 4))
    else:
        second = _code(b, inverse, KIND, BITS, FRACTION, BIAS)
        third = _code(c, inverse, KIND, BITS, FRACTION, BIAS)
        last = _code(d, inverse, KIND, BITS, FRACTION, BIAS)
        _put_byte(payload_ptr, to, 0, group, q, first | ((last & 3) << 6))
        _put_byte(payload_ptr, to, 1, group, q, second | (((last >> 2) & 3) << 6))
        _put_byte(payload_ptr, to, 2, group, q, third | ((last >> 4) << 6))


@triton.jit
def _encode_span(
    x_ptr, payload_ptr, scale_ptr, left, share, smallest,
    KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    if left >= SPAN:
        _encode_blocks(
            x_ptr, payload_ptr, scale_ptr, SPAN, BLOCK // LANES, SPAN // BLOCK, share, smallest,
            KIND, BITS, LANES, FRACTION, BIAS, BLOCK, SPAN,
        )  # fmt: skip
    else:
        each = tl.arange(0, SPAN // BLOCK)[:, None] * BLOCK
        group = (tl.minimum(tl.maximum(left - each, 0), BLOCK) + (LANES - 1)) // LANES
        _encode_blocks(
            x_ptr, payload_ptr, scale_ptr, left, group, tl.cdiv(left, BLOCK), share, smallest,
            KIND, BITS, LANES, FRACTION, BIAS, BLOCK, SPAN,
        )  # fmt: skip


@triton.jit
def _encode(
    x_ptr, payload_ptr, scale_ptr, numel, x_stride, payload_stride, scale_stride, share, smallest,
    KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    start, row = tl.program_id(0).to(tl.int64) * SPAN, tl.program_id(1).to(tl.int64)
    x_ptr += row * x_stride + start
    payload_ptr += row * payload_stride + start // LANES * (LANES * BITS // 8)
    scale_ptr += row * scale_stride + start // BLOCK
    left = (numel - start).to(tl.int32)
    _encode_span(x_ptr, payload_ptr, scale_ptr, left, share, smallest, KIND, BITS, LANES, FRACTION, BIAS, BLOCK, SPAN)


@triton.jit
def _place(table_ptr, payload_ptr, scale_ptr, ALIGNED: tl.constexpr):
    """(where numbers begin, codes, scales, how many numbers are left) of a span of a table."""
    table_ptr += tl.program_id(0) * 4
    scale_ptr += tl.load(table_ptr + 2)
    payload_ptr += tl.multiple_of(tl.load(table_ptr + 1), 16)
    return tl.multiple_of(tl.load(table_ptr), ALIGNED), payload_ptr, scale_ptr, tl.load(table_ptr + 3).to(tl.int32)


@triton.jit
def _encode_parts(
    x_ptr, payload_ptr, scale_ptr, table_ptr, x_stride, payload_stride, scale_stride, share, smallest,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    payload_ptr += row * payload_stride
    scale_ptr += row * scale_stride
    start, payload_ptr, scale_ptr, left = _place(table_ptr, payload_ptr, scale_ptr, ALIGNED)
    x_ptr += row * x_stride + start
    _encode_span(x_ptr, payload_ptr, scale_ptr, left, share, smallest, KIND, BITS, LANES, FRACTION, BIAS, BLOCK, SPAN)


@triton.jit
def _lanes(
    payload_ptr, scale, to, group, q,
    KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The numbers of four lanes; those that a format does not have are others once more."""
    first = _byte(payload_ptr, to, 0, group, q)
    second, third, last = first, first, first
    if BITS == 4:
        second = first >> 4
        first = first & 15
    elif LANES > 1:
        one, two = _byte(payload_ptr, to, 1, group, q), _byte(payload_ptr, to, 2, group, q)
        if BITS == 12:
            first, second = first | ((two & 15) << 8), one | ((two >> 4) << 8)
        else:
            last = (first >> 6) | ((one >> 6) << 2) | ((two >> 6) << 4)
            first, second, third = first & 63, one & 63, two & 63
    a = _value(first, KIND, BITS, FRACTION, BIAS) * scale
    b, c, d = a, a, a
    if LANES > 1:
        b = _value(second, KIND, BITS, FRACTION, BIAS) * scale
    if LANES > 2:
        c = _value(third, KIND, BITS, FRACTION, BIAS) * scale
        d = _value(last, KIND, BITS, FRACTION, BIAS) * scale
    return a, b, c, d


@triton.jit
def _decode_blocks(
    payload_ptr, scale_ptr, out_ptr, left, group, count, rows, payload_stride, scale_stride,
    SUM: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    blocks = tl.arange(0, SPAN // BLOCK)
    r = blocks[:, None]
    q = tl.arange(0, BLOCK // LANES)[None, :]
    to = r * (BLOCK // LANES * (LANES * BITS // 8))
    scale = tl.load(scale_ptr + blocks, mask=blocks < count, other=0.0)[:, None]
    a, b, c, d = _lanes(payload_ptr, scale, to, group, q, KIND, BITS, LANES, FRACTION, BIAS)
    if SUM:
        for _ in range(1, rows):
            payload_ptr += payload_stride
            scale_ptr += scale_stride
            scale = tl.load(scale_ptr + blocks, mask=blocks < count, other=0.0)[:, None]
            e, f, g, h = _lanes(payload_ptr, scale, to, group, q, KIND, BITS, LANES, FRACTION, BIAS)
            a += e
            if LANES > 1:
                b += f
            if LANES > 2:
                c += g
                d += h
    at, length = r * BLOCK, left - r * BLOCK
    _put(out_ptr, at, 0, group, length, q, a)
    if LANES > 1:
        _put(out_ptr, at, 1, group, length, q, b)
    if LANES > 2:
        _put(out_ptr, at, 2, group, length, q, c)
        _put(out_ptr, at, 3, group, length, q, d)


@triton.jit
def _decode_span(
    payload_ptr, scale_ptr, out_ptr, left, rows, next_payload, next_scale,
    SUM: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    if left >= SPAN:
        _decode_blocks(
            payload_ptr, scale_ptr, out_ptr, SPAN, BLOCK // LANES, SPAN // BLOCK, rows, next_payload, next_scale,
            SUM, KIND, BITS, LANES, FRACTION, BIAS, BLOCK, SPAN,
        )  # fmt: skip
    else:
        each = tl.arange(0, SPAN // BLOCK)[:, None] * BLOCK
        group = (tl.minimum(tl.maximum(left - each, 0), BLOCK) + (LANES - 1)) // LANES
        _decode_blocks(
            payload_ptr, scale_ptr, out_ptr, left, group, tl.cdiv(left, BLOCK), rows, next_payload, next_scale,
            SUM, KIND, BITS, LANES, FRACTION, BIAS, BLOCK, SPAN,
        )  # fmt: skip


@triton.jit
def _decode(
    payload_ptr, scale_ptr, out_ptr, numel, rows, payload_stride, scale_stride, next_payload, next_scale, out_stride,
    SUM: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    start, row = tl.program_id(0).to(tl.int64) * SPAN, tl.program_id(1).to(tl.int64)
    payload_ptr += row * payload_stride + start // LANES * (LANES * BITS // 8)
    scale_ptr += row * scale_stride + start // BLOCK
    out_ptr += row * out_stride + start
    left = (numel - start).to(tl.int32)
    _decode_span(
        payload_ptr, scale_ptr, out_ptr, left, rows, next_payload, next_scale,
        SUM, KIND, BITS, LANES, FRACTION, BIAS, BLOCK, SPAN,
    )  # fmt: skip


@triton.jit
def _sum_parts(
    payload_ptr, scale_ptr, out_ptr, table_ptr, rows, payload_stride, scale_stride, next_payload, next_scale,
    out_stride, ALIGNED: tl.constexpr,
    KIND: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    payload_ptr += row * payload_stride
    scale_ptr += row * scale_stride
    start, payload_ptr, scale_ptr, left = _place(table_ptr, payload_ptr, scale_ptr, ALIGNED)
    out_ptr += row * out_stride + start
    _decode_span(
        payload_ptr, scale_ptr, out_ptr, left, rows, next_payload, next_scale,
        True, KIND, BITS, LANES, FRACTION, BIAS, BLOCK, SPAN,
    )  # fmt: skip


def _constants(form: Format, block: int) -> dict[str, Any]:
    small = bool(form.exponent)
    return {
        "KIND": 4 if small else _KINDS[form.name],
        "BITS": form.bits,
        "LANES": form.lanes,
        "FRACTION": form.fraction if small else 0,
        "BIAS": form.bias if small else 0,
        "BLOCK": block,
        "SPAN": max(SPAN, block),
        "num_warps": SPAN_WARPS,
        "enable_fp_fusion": False,
    }


@lru_cache(512)
def _table(places: tuple[Place, ...], block: int, bits: int, device: torch.device) -> tuple[Tensor, int]:
    """Where each span of parts begins, see `_place`, and what all numbers begin at a multiple of."""
    span, spans = max(SPAN, block), []
    for start, length, payload, scale in places:
        at = torch.arange(0, length, span)
        step = at // span
        codes = payload + step * (span * bits // 8)
        spans.append(torch.stack([start + at, codes, scale + step * (span // block), (length - at).clamp(max=span)], 1))
    return torch.cat(spans).to(device), math.gcd(16, *(place[0] for place in places))


def encode(
    form: Format,
    block: int,
    places: tuple[Place, ...],
    values: Tensor,
    payload: Tensor,
    scales: Tensor,
    smallest: float,
) -> None:
    constants = _constants(form, block)
    strides = values.stride(0), payload.stride(0), scales.stride(0)
    if len(places) == 1:
        start, numel, code, scale = places[0]
        grid = cdiv(numel, constants["SPAN"]), len(values)
        given = values[:, start:], payload[:, code:], scales[:, scale:], numel
        launch(_encode, grid, *given, *strides, form.inverse, smallest, **constants)
        return
    table, aligned = _table(places, block, form.bits, values.device)
    grid, rest = (len(table), len(values)), (form.inverse, smallest)
    launch(_encode_parts, grid, values, payload, scales, table, *strides, *rest, ALIGNED=aligned, **constants)


def decode_sum(
    form: Format, block: int, places: tuple[Place, ...], payload: Tensor, scales: Tensor, out: Tensor
) -> None:
    constants, count = _constants(form, block), len(payload)
    strides = payload.stride(1), scales.stride(1), payload.stride(0), scales.stride(0), out.stride(0)
    if len(places) == 1:
        start, numel, code, scale = places[0]
        grid = cdiv(numel, constants["SPAN"]), len(out)
        given = payload[..., code:], scales[..., scale:], out[:, start:], numel
        launch(_decode, grid, *given, count, *strides, SUM=count > 1, **constants)
        return
    table, aligned = _table(places, block, form.bits, out.device)
    grid = len(table), len(out)
    launch(_sum_parts, grid, payload, scales, out, table, count, *strides, ALIGNED=aligned, **constants)


@triton.jit
def _signs(x_ptr, payload_ptr, square_ptr, numel, x_stride, payload_stride, BLOCK: tl.constexpr):
    start, row = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1).to(tl.int64)
    x_ptr += row * x_stride + start
    payload_ptr += row * payload_stride + start // 8
    length = tl.minimum(numel - start, BLOCK).to(tl.int32)
    q = tl.arange(0, BLOCK // 8)
    code = tl.zeros((BLOCK // 8,), dtype=tl.int32)
    squares = tl.zeros((BLOCK // 8,), dtype=tl.float32)
    if length == BLOCK:
        for lane in tl.static_range(8):
            x = tl.load(x_ptr + lane * (BLOCK // 8) + q).to(tl.float32)
            code |= (x < 0).to(tl.int32) << lane
            squares += x * x
        tl.store(payload_ptr + q, code.to(tl.uint8))
    else:
        group = (length + 7) // 8
        for lane in tl.static_range(8):
            at = lane * group + q
            x = tl.load(x_ptr + at, mask=(q < group) & (at < length), other=0.0).to(tl.float32)
            code |= (x < 0).to(tl.int32) << lane
            squares += x * x
        tl.store(payload_ptr + q, code.to(tl.uint8), mask=q < group)
    tl.store(square_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(squares, axis=0))


@triton.jit
def _with_sign(scale, code, lane):
    """The scale, below zero where the lane's bit is set."""
    return (scale.to(tl.int32, bitcast=True) ^ ((code >> lane) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _signed(
    payload_ptr, scale_ptr, out_ptr, numel, rows, payload_stride, scale_stride, out_stride,
    SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start, row = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1).to(tl.int64)
    payload_ptr += row * payload_stride + start // 8
    scale_ptr += row * scale_stride
    out_ptr += row * out_stride + start
    length = tl.minimum(numel - start, BLOCK).to(tl.int32)
    group = (length + 7) // 8
    lane = tl.arange(0, 8)[:, None]
    q = tl.arange(0, BLOCK // 8)[None, :]
    scale = tl.load(scale_ptr)
    code = tl.load(payload_ptr + q, mask=q < group, other=0).to(tl.int32)
    value = _with_sign(scale, code, lane)
    if SUM:
        for _ in range(1, rows):
            payload_ptr += payload_stride
            scale_ptr += scale_stride
            scale = tl.load(scale_ptr)
            code = tl.load(payload_ptr + q, mask=q < group, other=0).to(tl.int32)
            value += _with_sign(scale, code, lane)
    value = value.to(out_ptr.dtype.element_ty)
    if length == BLOCK:
        tl.store(out_ptr + (lane * (BLOCK // 8) + q), value)
    else:
        at = lane * group + q
        tl.store(out_ptr + at, value, mask=(q < group) & (at < length))


def signs(values: Tensor, payload: Tensor, block: int) -> Tensor:
    rows, numel = values.shape
    grid = cdiv(numel, block), rows
    squares = torch.empty(rows, grid[0], dtype=torch.float32, device=values.device)
    strides = values.stride(0), payload.stride(0)
    launch(_signs, grid, values, payload, squares, numel, *strides, BLOCK=block, num_warps=4)
    return squares.sum(1, keepdim=True).sqrt_()


def signed(payload: Tensor, scales: Tensor, out: Tensor, block: int, *, add: bool) -> None:
    rows, numel = len(payload), out.shape[-1]
    strides = payload.stride(0), scales.stride(0), 0 if add else out.stride(0)
    grid = cdiv(numel, block), 1 if add else rows
    launch(_signed, grid, payload, scales, out, numel, rows, *strides, SUM=add, BLOCK=block, num_warps=4)
