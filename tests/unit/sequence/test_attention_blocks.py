"""Attention in blocks that are merged, against torch's own over everything; and what sees what."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deepspeed.sequence import block_attention
from deepspeed.sequence.block_attention import AttentionBlock
from deepspeed.transformers.attention import CoreAttention, DocumentRun, SequenceInfo, attention_mask

WIDTH, LENGTH = 8, 12
AT = torch.arange(LENGTH)


def tensors(kv_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(2, 4, LENGTH, WIDTH), (2, kv_heads, LENGTH, WIDTH), (2, kv_heads, LENGTH, WIDTH)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def in_two_blocks(query, key, value, grad, seen):
    """Result and gradients with the keys cut in two; `seen` is None or a mask [batch, 1, queries, keys]."""
    halves = [slice(0, 5), slice(5, LENGTH)]
    made = [
        AttentionBlock(WIDTH**-0.5, mask=None if seen is None else lambda rows, h=h: seen[:, :, rows, h])
        for h in halves
    ]
    pairs = list(zip(halves, made, strict=True))
    out = torch.zeros(query.shape)
    lse = torch.full(query.shape[:3], -torch.inf)
    for half, block in pairs:
        out, lse = block_attention.merge(
            out, lse, *block_attention.forward(query, key[:, :, half], value[:, :, half], block)
        )
    grads = [torch.zeros_like(each) for each in (query, key, value)]
    for half, block in pairs:
        found = block_attention.backward(
            grad, (query, key[:, :, half], value[:, :, half]), out.to(query.dtype), lse, block
        )
        grads[0] += found[0]
        grads[1][:, :, half] += found[1]
        grads[2][:, :, half] += found[2]
    return out, grads


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_merged_blocks_are_attention(kv_heads, masked, monkeypatch):
    monkeypatch.setattr(block_attention, "_ROWS", 5)
    query, key, value = tensors(kv_heads)
    seen = (AT[:, None] >= AT[None]).expand(2, 1, LENGTH, LENGTH) if masked else None
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (query, key, value), grad)
    with torch.no_grad():
        out, found = in_two_blocks(query, key, value, grad, seen)
    torch.testing.assert_close(out, expected.detach(), atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_query_that_sees_nothing():
    query, key, value = tensors()
    seen = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    seen[:, :, 3] = False
    with torch.no_grad():
        out, found = in_two_blocks(query, key, value, torch.ones_like(query), seen)
    assert out[:, :, 3].abs().max() == 0
    assert found[0][:, :, 3].abs().max() == 0
    assert all(torch.isfinite(each).all() for each in (out, *found))


def test_causal_blocks_agree_with_the_torch_implementation():
    query, key, value = tensors(4)
    with torch.no_grad():
        fast = block_attention.forward(query, key, value, AttentionBlock(0.3, causal=True))
        plain = block_attention._forward(query, key, value, AttentionBlock(0.3, causal=True))
        grad = torch.randn_like(query)
        quick = block_attention.backward(grad, (query, key, value), *fast, AttentionBlock(0.3, causal=True))
        slow = block_attention._backward(grad, (query, key, value), *plain, AttentionBlock(0.3, causal=True))
    for mine, theirs in zip((*fast, *quick), (*plain, *slow), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_documents_and_padding():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4], list(range(12))])
    packed = SequenceInfo.of(LENGTH, positions, torch.ones(2, LENGTH, dtype=torch.bool))
    assert packed.present is None
    assert packed.documents[0].tolist() == [0] * 3 + [1] * 4 + [2] * 5
    assert packed.runs == [[DocumentRun(0, 3), DocumentRun(3, 7), DocumentRun(7, 12)], [DocumentRun(0, 12)]]
    assert SequenceInfo.of(LENGTH, positions[1:], None).plain
    present = (AT < 9)[None].expand(2, LENGTH)
    padded = SequenceInfo.of(LENGTH, positions, present)
    assert padded.runs == [
        [DocumentRun(0, 3), DocumentRun(3, 7), DocumentRun(7, 9), DocumentRun(9, 12, True)],
        [DocumentRun(0, 9), DocumentRun(9, 12, True)],
    ]
    left = SequenceInfo.of(LENGTH, None, ~(AT < 2)[None])
    assert left.runs == [[DocumentRun(0, 2, True), DocumentRun(2, 12)]]
    holes = SequenceInfo.of(LENGTH, None, (AT != 5)[None])
    assert holes.runs is None, "tokens on both sides of a hole see each other"
    seen = attention_mask(packed, AT, AT, causal=True, window=2)
    expected = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for query, key in torch.cartesian_prod(AT, AT).tolist():
        same = packed.documents[0, query] == packed.documents[0, key]
        expected[query, key] = bool(same) and 0 <= query - key < 2
    assert torch.equal(seen[0, 0], expected)


@pytest.mark.parametrize("kind", ["packed", "padded", "left", "holes", "window", "whole"])
def test_the_core_over_runs_and_masks(kind):
    """What sees what is as a mask over everything would say, however it is computed."""

    def sdpa(module, query, key, value, mask, is_causal=True, **options):
        causal = is_causal and mask is None
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2), None

    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, LENGTH)
    whole = {
        "packed": SequenceInfo.of(LENGTH, positions, None),
        "padded": SequenceInfo.of(LENGTH, None, (AT < 9).expand(2, LENGTH)),
        "left": SequenceInfo.of(LENGTH, None, (AT >= 4).expand(2, LENGTH)),
        "holes": SequenceInfo.of(LENGTH, None, (AT != 5).expand(2, LENGTH)),
    }.get(kind, SequenceInfo(LENGTH))
    window = 4 if kind == "window" else None
    query, key, value = tensors()
    found, _ = CoreAttention("sdpa", sdpa)(torch.nn.Identity(), query, key, value, whole, sliding_window=window)
    mask = attention_mask(whole, AT, AT, causal=True, window=window)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    rows = AT < 9 if kind == "padded" else AT != 5 if kind == "holes" else AT >= 0
    torch.testing.assert_close(found[:, rows], expected[:, rows], atol=1e-5, rtol=1e-5)
