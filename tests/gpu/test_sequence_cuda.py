"""Attention in blocks by flash kernels on a GPU, against attention in float64."""

from __future__ import annotations

import pytest
import torch

from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.sequence import block_attention
from deepspeed.sequence.block_attention import AttentionBlock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [64, 100])
def test_blocks_by_flash(length, causal, dtype):
    torch.manual_seed(0)
    shapes = [(2, 8, length, 64), (2, 2, length, 64), (2, 2, length, 64)]
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    grad = torch.randn_like(query)
    half = length // 2
    pairs = [(slice(0, half), slice(0, half), causal), (slice(half, length), slice(half, length), causal)]
    pairs.append((slice(half, length), slice(0, half), False))
    if not causal:
        pairs.append((slice(0, half), slice(half, length), False))
    out = torch.zeros(query.shape, device="cuda")
    lse = torch.full(query.shape[:3], -torch.inf, device="cuda")
    for rows, columns, diagonal in pairs:
        found = block_attention.forward(
            query[:, :, rows], key[:, :, columns], value[:, :, columns], AttentionBlock(0.125, diagonal)
        )
        out[:, :, rows], lse[:, :, rows] = block_attention.merge(out[:, :, rows], lse[:, :, rows], *found)
    result = out.to(dtype)
    grads = [torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)]
    for rows, columns, diagonal in pairs:
        saved = (query[:, :, rows], key[:, :, columns], value[:, :, columns])
        found = block_attention.backward(
            grad[:, :, rows], saved, result[:, :, rows], lse[:, :, rows], AttentionBlock(0.125, diagonal)
        )
        for total, part, where in zip(grads, found, (rows, columns, columns), strict=True):
            total[:, :, where] += part
    leaves = [each.double().requires_grad_() for each in (query, key, value)]
    wide = [leaves[0], *(each.repeat_interleave(4, 1) for each in leaves[1:])]
    scores = wide[0] @ wide[1].transpose(2, 3) * 0.125
    if causal:
        at = torch.arange(length, device="cuda")
        scores = scores.masked_fill(at[:, None] < at[None], -torch.inf)
    expected = scores.softmax(-1) @ wide[2]
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    near = 1e-4 if dtype == torch.float32 else 3e-2
    for mine, theirs in zip((out, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=near, rtol=near)
