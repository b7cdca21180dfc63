"""Attention in blocks that are merged, against torch's own over everything; and what sees what."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deepspeed.sequence import blocks
from deepspeed.sequence.blocks import Block, Distances
from deepspeed.sequence.core import Core
from deepspeed.sequence.distance_bias import DistanceBias
from deepspeed.sequence.whole import Run, Whole, allowed

WIDTH, LENGTH = 8, 12
AT = torch.arange(LENGTH)


def tensors(kv_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(2, 4, LENGTH, WIDTH), (2, kv_heads, LENGTH, WIDTH), (2, kv_heads, LENGTH, WIDTH)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def in_two_blocks(query, key, value, grad, seen):
    """Result and gradients with the keys cut in two; `seen` is None or a mask [batch, 1, queries, keys]."""
    halves = [slice(0, 5), slice(5, LENGTH)]
    made = [Block(WIDTH**-0.5, mask=None if seen is None else lambda rows, h=h: seen[:, :, rows, h]) for h in halves]
    pairs = list(zip(halves, made, strict=True))
    out = torch.zeros(query.shape)
    lse = torch.full(query.shape[:3], -torch.inf)
    for half, block in pairs:
        out, lse = blocks.merge(out, lse, *blocks.forward(query, key[:, :, half], value[:, :, half], block))
    grads = [torch.zeros_like(each) for each in (query, key, value)]
    for half, block in pairs:
        found = blocks.backward(grad, (query, key[:, :, half], value[:, :, half]), out.to(query.dtype), lse, block)
        grads[0] += found[0]
        grads[1][:, :, half] += found[1]
        grads[2][:, :, half] += found[2]
    return out, grads


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_merged_blocks_are_attention(kv_heads, masked, monkeypatch):
    monkeypatch.setattr(blocks, "_ROWS", 5)
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


def test_biases_by_distance(monkeypatch):
    """Blocks of queries and keys that lie anywhere: the gradient of the table is the sum of those of all blocks."""
    monkeypatch.setattr(blocks, "_ROWS", 5)
    query, key, value = tensors()
    bias = DistanceBias(torch.randn(2 * LENGTH - 1, 4, requires_grad=True))
    causal = AT[:, None] >= AT[None]
    scores = torch.where(causal, bias.whole(), -torch.inf)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=scores, enable_gqa=True)
    grad = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, bias.table, grad)
    found, total = torch.zeros_like(wanted), 0
    order = torch.cat([AT[3:], AT[:3]])
    with torch.no_grad():
        for keys in (order[:7], order[7:]):
            distances = Distances(bias.table, lambda rows, keys=keys: bias.rows(order[rows], keys), found)
            mask = lambda rows, keys=keys: causal[order[rows]][:, keys][None, None]  # noqa: E731
            block = Block(WIDTH**-0.5, mask=mask, distances=distances)
            saved = (query[:, :, order], key[:, :, keys], value[:, :, keys])
            lse = (scaled(query, key) + scores).logsumexp(-1)[:, :, order]
            out, own = blocks.forward(*saved, block)
            total = total + out * (own - lse).exp()[..., None]
            blocks.backward(grad[:, :, order], saved, expected[:, :, order], lse, block)
    torch.testing.assert_close(total, expected[:, :, order].detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(bias.of_heads((3, 1), 1).table, bias.table[:, 3:]), "the heads of the second rank"


def scaled(query, key):
    return query @ key.repeat_interleave(2, 1).transpose(2, 3) * WIDTH**-0.5


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
        fast = blocks.forward(query, key, value, Block(0.3, causal=True))
        plain = blocks._forward(query, key, value, Block(0.3, causal=True))
        grad = torch.randn_like(query)
        quick = blocks.backward(grad, (query, key, value), *fast, Block(0.3, causal=True))
        slow = blocks._backward(grad, (query, key, value), *plain, Block(0.3, causal=True))
    for mine, theirs in zip((*fast, *quick), (*plain, *slow), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_documents_and_padding():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4], list(range(12))])
    packed = Whole.of(LENGTH, positions, torch.ones(2, LENGTH, dtype=torch.bool))
    assert packed.present is None
    assert packed.documents[0].tolist() == [0] * 3 + [1] * 4 + [2] * 5
    assert packed.runs == [[Run(0, 3), Run(3, 7), Run(7, 12)], [Run(0, 12)]]
    assert Whole.of(LENGTH, positions[1:], None).plain
    present = (AT < 9)[None].expand(2, LENGTH)
    padded = Whole.of(LENGTH, positions, present)
    assert padded.runs == [[Run(0, 3), Run(3, 7), Run(7, 9), Run(9, 12, True)], [Run(0, 9), Run(9, 12, True)]]
    left = Whole.of(LENGTH, None, ~(AT < 2)[None])
    assert left.runs == [[Run(0, 2, True), Run(2, 12)]]
    holes = Whole.of(LENGTH, None, (AT != 5)[None])
    assert holes.runs is None, "tokens on both sides of a hole see each other"
    seen = allowed(packed, AT, AT, causal=True, window=2)
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
        "packed": Whole.of(LENGTH, positions, None),
        "padded": Whole.of(LENGTH, None, (AT < 9).expand(2, LENGTH)),
        "left": Whole.of(LENGTH, None, (AT >= 4).expand(2, LENGTH)),
        "holes": Whole.of(LENGTH, None, (AT != 5).expand(2, LENGTH)),
    }.get(kind, Whole(LENGTH))
    window = 4 if kind == "window" else None
    query, key, value = tensors()
    found, _ = Core("sdpa", sdpa)(torch.nn.Identity(), query, key, value, whole, sliding_window=window)
    mask = allowed(whole, AT, AT, causal=True, window=window)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    rows = AT < 9 if kind == "padded" else AT != 5 if kind == "holes" else AT >= 0
    torch.testing.assert_close(found[:, rows], expected[:, rows], atol=1e-5, rtol=1e-5)
