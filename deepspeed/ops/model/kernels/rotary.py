"""Rotary position embedding of queries and keys: both in one launch, out of and into any layout of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import next_power, warps
from deepspeed.ops.precompile import launch


@triton.jit
def _heads(
    x_ptr, y_ptr, in_head, out_head, cos1, cos2, sin1, sin2, heads, half, rest, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (at < half)
    x1 = tl.load(x_ptr + head * in_head + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + head * in_head + half + at, mask=inside, other=0.0).to(tl.float32)
    if sign > 0:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    else:  # the transposed rotation, which is not the inverse one where the two halves of an angle differ
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    tl.store(y_ptr + head * out_head + at, y1.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + head * out_head + half + at, y2.to(y_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        at = tl.arange(0, REST)[None, :]
        inside = (head < heads) & (at < rest)
        x = tl.load(x_ptr + head * in_head + 2 * half + at, mask=inside)
        tl.store(y_ptr + head * out_head + 2 * half + at, x, mask=inside)


@triton.jit
def _rotate(
    q_ptr, k_ptr, q_out, k_out, cos_ptr, sin_ptr, length, half, rest, q_heads, k_heads,
    q_batch, q_head, q_token, k_batch, k_head, k_token, cos_batch, cos_token, sign,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    batch, token = place // length, place % length
    at = tl.arange(0, HALF)[None, :]
    angle = cos_batch * batch + cos_token * token
    cos1 = tl.load(cos_ptr + angle + at, mask=at < half, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + angle + half + at, mask=at < half, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + angle + at, mask=at < half, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + angle + half + at, mask=at < half, other=0.0).to(tl.float32)
    width = 2 * half + rest
    _heads(
        q_ptr + batch * q_batch + token * q_token, q_out + place * q_heads * width, q_head, width,
        cos1, cos2, sin1, sin2, q_heads, half, rest, sign, Q_HEADS, HALF, REST,
    )  # fmt: skip
    _heads(
        k_ptr + batch * k_batch + token * k_token, k_out + place * k_heads * width, k_head, width,
        cos1, cos2, sin1, sin2, k_heads, half, rest, sign, K_HEADS, HALF, REST,
    )  # fmt: skip


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate [batch, heads, tokens, width] by [1 or batch, tokens, angles]; `transposed` is what the backward needs.

    What is wider than the angles stays as it is behind them.

    The results have the same shape, and the memory of [batch, tokens, heads, width]: what linear layers and the
    kernels of attention read without a copy.
    """
    batch, q_heads, length, width = q.shape
    k_heads, half, rest = k.shape[1], cos.shape[-1] // 2, width - cos.shape[-1]
    outs = [x.new_empty(batch, length, x.shape[1], width) for x in (q, k)]
    q_block, k_block, half_block = (next_power(n) for n in (q_heads, k_heads, half))
    if q.numel():
        launch(
            _rotate, (batch * length,),
            q, k, *outs, cos, sin, length, half, rest, q_heads, k_heads,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), -1 if transposed else 1,
            Q_HEADS=q_block, K_HEADS=k_block, HALF=half_block, REST=next_power(rest) if rest else 0,
            num_warps=warps(q_block * half_block),
        )  # fmt: skip
    q_out, k_out = (out.transpose(1, 2) for out in outs)
    return q_out, k_out
