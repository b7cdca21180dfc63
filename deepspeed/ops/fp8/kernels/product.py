"""Products of 8-bit numbers whose rows have a scale for each 128 numbers: partial sums are scaled as float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.fp8.quantise import SIDE
from deepspeed.ops.model.kernels.common import cdiv
from deepspeed.ops.precompile import launch

TILE, WARPS, STAGES = (128, 128), 8, 3
GROUP = 8
"""Tiles of rows whose programs run one after the other, so that they find the other factor in the cache."""


@triton.jit
def _group_product(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, out_ptr, m, n, k, a_lines, b_lines,
    A_LINES: tl.constexpr, B_LINES: tl.constexpr, SIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    downs, rights = tl.cdiv(m, M), tl.cdiv(n, N)
    number = tl.program_id(0)
    first = number // (GROUP * rights) * GROUP
    height = tl.minimum(downs - first, GROUP)
    within = number % (GROUP * rights)
    rows = (first + within % height) * M + tl.arange(0, M)
    columns = (within // height) * N + tl.arange(0, N)
    along = tl.arange(0, SIDE)
    a_at = a_ptr + (rows % m).to(tl.int64)[:, None] * k + along[None, :]
    b_at = b_ptr + (columns % n).to(tl.int64)[None, :] * k + along[:, None]
    padded = tl.cdiv(k, 4 * SIDE) * 4  # strides are those of `scales` in groups.py
    a_scale_at = a_scale_ptr + (rows % m if A_LINES == 1 else (rows % m) // SIDE * padded)
    b_scale_at = b_scale_ptr + (columns % n if B_LINES == 1 else (columns % n) // SIDE * padded)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, SIDE):
        a = tl.load(a_at, mask=along[None, :] < k - start, other=0.0)
        b = tl.load(b_at, mask=along[:, None] < k - start, other=0.0)
        scale = tl.load(a_scale_at)[:, None] * tl.load(b_scale_at)[None, :]
        total += tl.dot(a, b) * scale
        a_at += SIDE
        b_at += SIDE
        a_scale_at += a_lines if A_LINES == 1 else 1
        b_scale_at += b_lines if B_LINES == 1 else 1
    place = out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


def group_product(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a · bᵀ of contiguous [m, k] and [n, k]; scales are [m, k / 128] or [m / 128, k / 128], and of n alike."""
    (m, k), n = a.shape, len(b)
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    left, right = scales
    a_strips, b_strips = len(left) == m, len(right) == n
    launch(
        _group_product, (cdiv(m, TILE[0]) * cdiv(n, TILE[1]),),
        a, b, left, right, out, m, n, k, left.stride(1) if a_strips else m, right.stride(1) if b_strips else n,
        A_LINES=1 if a_strips else SIDE, B_LINES=1 if b_strips else SIDE, SIDE=SIDE,
        M=TILE[0], N=TILE[1], GROUP=GROUP, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
