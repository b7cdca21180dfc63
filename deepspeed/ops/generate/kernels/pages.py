"""Keys and values to their slots, with the rotation of queries and keys in the same launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import after_others, cdiv, next_power, overlaps, warps
from deepspeed.ops.precompile import launch

if TYPE_CHECKING:
    from deepspeed.ops.generate.pages import PageTarget


@triton.jit
def _narrowed(x, scale_ptr, head, inside, NARROW: tl.constexpr, SCALED: tl.constexpr, EACH: tl.constexpr):
    """float32 numbers as pages take them."""
    if SCALED:
        if EACH:
            x = x / tl.load(scale_ptr + head, mask=inside, other=1.0)
        else:
            x = x / tl.load(scale_ptr)
    if NARROW:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x


@triton.jit
def _put(
    x_ptr, x_head, page_ptr, page_head, scale_ptr, heads, width,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (at < width)
    x = tl.load(x_ptr + head * x_head + at, mask=inside, other=0.0)
    if SCALED or NARROW:
        x = _narrowed(x.to(tl.float32), scale_ptr, head, head < heads, NARROW, SCALED, EACH)
    tl.store(page_ptr + head * page_head + at, x.to(page_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _turn(
    x_ptr, x_head, y_ptr, y_head, cos_ptr, sin_ptr, scale_ptr, heads, half, rest,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NARROW: tl.constexpr, SCALED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    known, some = at < half, head < heads
    cos1 = tl.load(cos_ptr + at, mask=known, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + half + at, mask=known, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + at, mask=known, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + half + at, mask=known, other=0.0).to(tl.float32)
    type: tl.constexpr = x_ptr.dtype.element_ty
    first, second = x_ptr + head * x_head + at, y_ptr + head * y_head + at
    x1 = tl.load(first, mask=some & known, other=0.0).to(tl.float32)
    x2 = tl.load(first + half, mask=some & known, other=0.0).to(tl.float32)
    y1 = (x1 * cos1 - x2 * sin1).to(type).to(tl.float32)  # rounded as the rotation by itself is
    y2 = (x2 * cos2 + x1 * sin2).to(type).to(tl.float32)
    y1 = _narrowed(y1, scale_ptr, head, some, NARROW, SCALED, EACH)
    y2 = _narrowed(y2, scale_ptr, head, some, NARROW, SCALED, EACH)
    tl.store(second, y1.to(y_ptr.dtype.element_ty), mask=some & known)
    tl.store(second + half, y2.to(y_ptr.dtype.element_ty), mask=some & known)
    if REST > 0:
        behind = 2 * half
        _put(x_ptr + behind, x_head, y_ptr + behind, y_head, scale_ptr, heads, rest, HEADS, REST, NARROW, SCALED, EACH)


@triton.jit
def _write(
    q_ptr, k_ptr, v_ptr, out_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, slots_ptr, key_scale, value_scale,
    size, q_heads, heads, half, rest, value_width, cos_token, sin_token, q_token, q_head,
    k_token, k_head, v_token, v_head, key_block, key_token, key_head, value_block, value_token, value_head,
    ROTATE: tl.constexpr, Q_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, NARROW: tl.constexpr, KEY_SCALED: tl.constexpr, KEY_EACH: tl.constexpr,
    VALUE_SCALED: tl.constexpr, VALUE_EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for the keys of a token, one for its values; with ROTATE more, for some heads of the query each."""
    after_others(PDL)
    token, what = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if ROTATE:
        cos_ptr += token * cos_token
        sin_ptr += token * sin_token
        if what >= 2:
            first = (what - 2) * Q_HEADS
            width = 2 * half + rest
            _turn(
                q_ptr + token * q_token + first * q_head, q_head, out_ptr + (token * q_heads + first) * width, width,
                cos_ptr, sin_ptr, key_scale, q_heads - first, half, rest, Q_HEADS, HALF, REST, False, False, False,
            )  # fmt: skip
            return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block, offset = slot // size, slot % size
    k_ptr += token * k_token
    key_ptr += block * key_block + offset * key_token
    if what == 1:
        _put(
            v_ptr + token * v_token, v_head, value_ptr + block * value_block + offset * value_token, value_head,
            value_scale, heads, value_width, HEADS, VALUE_WIDTH, NARROW, VALUE_SCALED, VALUE_EACH,
        )  # fmt: skip
    elif ROTATE:
        _turn(
            k_ptr, k_head, key_ptr, key_head, cos_ptr, sin_ptr, key_scale, heads, half, rest, HEADS, HALF, REST,
            NARROW, KEY_SCALED, KEY_EACH,
        )  # fmt: skip
    else:
        _put(k_ptr, k_head, key_ptr, key_head, key_scale, heads, rest, HEADS, REST, NARROW, KEY_SCALED, KEY_EACH)


def _ways(target: PageTarget) -> dict[str, bool]:
    scales = {"KEY": target.key_scale, "VALUE": target.value_scale}
    ways = {"NARROW": target.key_pages.dtype == torch.float8_e4m3fn}
    for name, scale in scales.items():
        ways[name + "_SCALED"] = scale is not None
        ways[name + "_EACH"] = scale is not None and scale.numel() > 1
    return ways


def write(key: Tensor, value: Tensor, target: PageTarget) -> None:
    """Op `write_pages`."""
    if key.numel():
        _launch(key, value, target, (key, key, target.slots, target.slots), 0)


def rotate_and_write(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, target: PageTarget) -> Tensor:
    """Op `rotary_write`."""
    out = query.new_empty(query.shape)
    if query.numel():
        _launch(key, value, target, (query, out, cos, sin), cos.shape[-1] // 2)
    return out


def _launch(key: Tensor, value: Tensor, target: PageTarget, turned: Sequence[Tensor], half: int) -> None:
    """`turned`: query, its result, cos and sin, which count where half of the width that is rotated is not 0."""
    query, out, cos, sin = turned
    (tokens, heads, width), q_heads, rotate = key.shape, query.shape[1], half > 0
    rest = width - 2 * half
    block, some, wide = next_power(heads), min(8, next_power(q_heads)), next_power(half or width)
    scales = [target.slots if scale is None else scale for scale in (target.key_scale, target.value_scale)]
    launch(
        _write, (tokens, 2 + cdiv(q_heads, some) if rotate else 2),
        query, key, value, out, cos, sin, target.key_pages, target.value_pages, target.slots, *scales,
        target.key_pages.shape[1], q_heads, heads, half, rest, value.shape[2], cos.stride(0), sin.stride(0),
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *target.key_pages.stride()[:3],
        *target.value_pages.stride()[:3],
        ROTATE=rotate, Q_HEADS=some, HEADS=block, HALF=wide, REST=next_power(rest) if rest else 0,
        VALUE_WIDTH=next_power(value.shape[2]), **_ways(target),
        num_warps=warps(max(block, some if rotate else 1) * wide), **overlaps(key.device),
    )  # fmt: skip
