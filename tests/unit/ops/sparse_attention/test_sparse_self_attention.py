"""Sparse attention equals dense attention with a mask, forward and backward, whatever computes it."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from deepspeed.errors import UsageError
from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    MatMul,
    Softmax,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
)
from deepspeed.ops.sparse_attention.attend import flex

HEADS, BLOCK = 2, 8
CONFIGS = {
    "dense": DenseSparsityConfig(HEADS, BLOCK),
    "fixed": FixedSparsityConfig(HEADS, BLOCK, True, 2, 1, num_different_global_patterns=2),
    "fixed, one way": FixedSparsityConfig(HEADS, BLOCK, attention="unidirectional"),
    "variable": VariableSparsityConfig(HEADS, BLOCK, True, 1, [1, 2]),
    "variable, one way": VariableSparsityConfig(HEADS, BLOCK, num_random_blocks=1, attention="unidirectional"),
    "bigbird": BigBirdSparsityConfig(HEADS, BLOCK, True),
    "bigbird, one way": BigBirdSparsityConfig(HEADS, BLOCK, attention="unidirectional"),
    "bslongformer": BSLongformerSparsityConfig(HEADS, BLOCK, global_block_indices=[1]),
    "bslongformer, one way": BSLongformerSparsityConfig(HEADS, BLOCK, attention="unidirectional"),
    "window": LocalSlidingWindowSparsityConfig(HEADS, BLOCK),
}


def dense(query, key, value, layout, causal, bias):
    """softmax(Q·Kᵀ/√d + bias)·V in which what is not allowed is -inf: the formula as it stands in papers."""
    length = query.shape[2]
    allowed = torch.kron(layout, torch.ones(BLOCK, BLOCK, dtype=layout.dtype))[:, :length, :length].bool()
    if causal:
        allowed &= torch.ones(length, length).tril().bool()
    scores = torch.einsum("bhid,bhjd->bhij", query, key) / math.sqrt(query.shape[-1]) + bias
    return torch.softmax(scores.masked_fill(~allowed, -math.inf), -1) @ value


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [64, 45])
def test_equals_dense_attention_with_a_mask(name, length):
    torch.manual_seed(0)
    config = CONFIGS[name]
    attention = SparseSelfAttention(config, max_seq_length=64)
    query, key, value = (random(2, HEADS, length, 4) for _ in range(3))
    rpe = random(1, HEADS, length, length)
    padding = torch.zeros(2, length, dtype=torch.float64)
    padding[1, -7:] = -math.inf
    padding[:, 0] = 0.5
    allowed = torch.rand(length, length) > 0.1
    allowed |= torch.eye(length, dtype=torch.bool)
    padding_of_none = torch.zeros(2, length, dtype=torch.float64)
    for keys, pairs in ((padding_of_none, None), (padding, allowed.long())):
        found = attention(query, key, value, rpe, None if pairs is None else keys, pairs)
        bias = rpe + keys[:, None, None, :]
        if pairs is not None:
            bias = bias.masked_fill(pairs == 0, -math.inf)
            bias = bias[:, :, : length - 7]  # rows of padding may have nothing left
            found = found[:, :, : length - 7]
        rows = bias.shape[2]
        full = torch.cat([bias, bias.new_zeros(*bias.shape[:2], length - rows, length)], 2)
        expected = dense(query, key, value, attention.get_layout(length), config.causal, full)[:, :, :rows]
        torch.testing.assert_close(found, expected)
        seed = torch.randn_like(expected)
        inputs = (query, key, value, rpe)
        for one, other in zip(
            torch.autograd.grad(found, inputs, seed), torch.autograd.grad(expected, inputs, seed), strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "bigbird, one way"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_calculates_the_same(name):
    """What runs on a GPU, uncompiled; with more than one of its own blocks, and heads that its kernels do not take."""
    torch.manual_seed(0)
    length = 300
    config = CONFIGS[name]
    attention = SparseSelfAttention(config, max_seq_length=320)
    query, key, value = (torch.randn(2, HEADS, length, 4) for _ in range(3))
    rpe = torch.randn(HEADS, length, length)[None]
    padding = torch.zeros(2, 1, 1, length)
    padding[1, ..., -7:] = -math.inf
    pattern = attention._pattern(query)
    assert int(pattern.block_mask.kv_num_blocks.sum()) > 0
    found = flex(flex_attention, query, key, value, pattern, (rpe, padding))
    torch.testing.assert_close(found, attention(query, key, value, rpe, padding), rtol=1e-5, atol=1e-5)


def test_whole_blocks_of_flex_attention_are_marked_as_such():
    attention = SparseSelfAttention(DenseSparsityConfig(HEADS, 64), max_seq_length=256)
    mask = attention._pattern(torch.empty(1, HEADS, 256, 4)).block_mask
    assert (mask.kv_num_blocks.sum().item(), mask.full_kv_num_blocks.sum().item()) == (0, 4)
    one_way = SparseSelfAttention(LocalSlidingWindowSparsityConfig(HEADS, 128), max_seq_length=512)
    mask = one_way._pattern(torch.empty(1, HEADS, 512, 4)).block_mask
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 1, 1]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    config = CONFIGS["bigbird"]
    attention = SparseSelfAttention(config, max_seq_length=64)
    query, key, value = (random(1, HEADS, 45, 16, dtype=dtype) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):  # which changes nothing
        found = attention(query, key, value)
    assert found.dtype == dtype
    wide = [each.detach().double().requires_grad_() for each in (query, key, value)]
    expected = dense(*wide, attention.get_layout(45), False, 0.0)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=step, atol=1e-3)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(value.grad.double(), wide[2].grad, rtol=4 * step, atol=1e-2)
    torch.testing.assert_close(query.grad.double(), wide[0].grad, rtol=4 * step, atol=1e-2)


def test_a_query_that_may_attend_to_nothing_gets_zeros_and_no_gradient():
    attention = SparseSelfAttention(CONFIGS["dense"], key_padding_mask_mode="mul", max_seq_length=16)
    query, key, value = (random(1, HEADS, 10, 4) for _ in range(3))
    out = attention(query, key, value, key_padding_mask=torch.zeros(1, 10))
    out.sum().backward()
    for each in (out, query.grad, key.grad, value.grad):
        assert torch.equal(each, torch.zeros_like(each))


def test_masks_come_in_several_forms():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, HEADS, 20, 4) for _ in range(3))
    present = torch.rand(2, 20) > 0.3
    present[:, 0] = True
    minus = torch.zeros(2, 1, 1, 20).masked_fill(~present[:, None, None], -math.inf)
    by_sum = SparseSelfAttention(CONFIGS["dense"], max_seq_length=24)
    by_factor = SparseSelfAttention(CONFIGS["dense"], key_padding_mask_mode="mul", max_seq_length=24)
    expected = by_sum(query, key, value, key_padding_mask=minus)
    assert not torch.equal(expected, by_sum(query, key, value))
    torch.testing.assert_close(by_sum(query, key, value, key_padding_mask=present), expected)
    torch.testing.assert_close(by_factor(query, key, value, key_padding_mask=present.float()), expected)
    torch.testing.assert_close(by_sum(query, key, value, attn_mask=present[:, None, None]), expected)
    torch.testing.assert_close(by_sum(query, key.transpose(2, 3), value, key_padding_mask=minus), expected)


@pytest.mark.parametrize("name", ["fixed", "bigbird"])
def test_the_products_and_the_softmax_of_blocks_compose_it(name):
    torch.manual_seed(0)
    attention = SparseSelfAttention(CONFIGS[name], attn_mask_mode="add", max_seq_length=32)
    query, key, value = (random(2, HEADS, 32, 4) for _ in range(3))
    rpe, keys, pairs = random(1, HEADS, 32, 32), torch.randn(2, 32), torch.randn(32, 32)
    scores, values, softmax = attention.get_ops(HEADS, 32)
    weights = softmax(scores(query, key), scale=0.5, rpe=rpe, key_padding_mask=keys, attn_mask=pairs)
    expected = attention(query, key, value, rpe, keys, pairs)
    found = values(weights, value)
    torch.testing.assert_close(found, expected)
    inputs = (query, key, value, rpe)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_products_of_blocks(mode, trans_a, trans_b):
    torch.manual_seed(0)
    layout = torch.tensor([[[1, 0, 1], [0, 0, 1]], [[0, 1, 1], [1, 0, 0]]])  # not square: 2 × 3 blocks of 4
    mask = torch.kron(layout, torch.ones(4, 4, dtype=torch.long)).double()
    sparse = torch.randn(2, 2, 8, 12, dtype=torch.float64) * mask
    tiles = sparse.unflatten(3, (3, 4)).unflatten(2, (2, 4)).transpose(3, 4)
    head, row, column = layout.nonzero().unbind(1)
    blocks = tiles[:, head, row, column]
    turn = lambda tensor, turned: tensor.transpose(2, 3) if turned else tensor  # noqa: E731
    product = MatMul(layout, 4, mode, trans_a=trans_a, trans_b=trans_b)
    if mode == "sdd":
        a, b = torch.randn(2, 2, 8, 5, dtype=torch.float64), torch.randn(2, 2, 5, 12, dtype=torch.float64)
        whole = (a @ b).unflatten(3, (3, 4)).unflatten(2, (2, 4)).transpose(3, 4)
        torch.testing.assert_close(product(turn(a, trans_a), turn(b, trans_b)), whole[:, head, row, column])
    elif mode == "dsd":
        b = torch.randn(2, 2, 8 if trans_a else 12, 5, dtype=torch.float64)
        torch.testing.assert_close(product(blocks, turn(b, trans_b)), turn(sparse, trans_a) @ b)
    else:
        a = torch.randn(2, 2, 5, 12 if trans_b else 8, dtype=torch.float64)
        torch.testing.assert_close(product(turn(a, trans_a), blocks), a @ turn(sparse, trans_b))


def test_rows_without_a_block_have_no_weights():
    layout = torch.tensor([[[1, 1], [0, 0]]])
    weights = Softmax(layout, 2)(torch.randn(1, 2, 2, 2))
    torch.testing.assert_close(weights.sum((1, 3)), torch.ones(1, 2))


def test_the_layout_is_saved_and_loaded_with_the_model():
    attention = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK), max_seq_length=64)
    query, key, value = (torch.randn(1, HEADS, 64, 4) for _ in range(3))
    other = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK, seed=3), max_seq_length=64)
    assert not torch.equal(attention(query, key, value), other(query, key, value))
    other.load_state_dict(attention.state_dict())
    assert torch.equal(attention(query, key, value), other(query, key, value))
    attention._pattern(query).block_mask  # noqa: B018 - what it remembers cannot be pickled
    file = io.BytesIO()
    torch.save(attention, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(query, key, value), attention(query, key, value))


def test_some_of_the_heads_of_one_layout():
    """As a rank of tensor parallelism has them."""
    attention = SparseSelfAttention(FixedSparsityConfig(4, BLOCK), max_seq_length=64)
    query, key, value = (torch.randn(1, 4, 40, 4) for _ in range(3))
    half = attention(query[:, 2:], key[:, 2:], value[:, 2:])
    torch.testing.assert_close(half, attention(query, key, value)[:, 2:])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a, q: SparseSelfAttention()(q, q, q), "has no sparsity_config; give it one, or a sparse_attention"),
        (lambda a, q: SparseSelfAttention(SparsityConfig(2)), "SparsityConfig has no pattern"),
        (lambda a, q: SparseSelfAttention(attn_mask_mode="or"), "attn_mask_mode is 'or'"),
        (lambda a, q: a(q, q, q[:, :, 1:]), "self-attention needs equal ones"),
        (lambda a, q: a(q[0], q[0], q[0]), r"expected \[batch, heads, length, d\]"),
        (lambda a, q: a(*[q.repeat(1, 1, 4, 1)] * 3), "has 40 tokens, and max_seq_length is 32.*max_seq_length=40"),
        (lambda a, q: a(*[q.repeat(1, 2, 1, 1)] * 3), "4 heads, and the layout has 2 different ones"),
        (lambda a, q: a(q, q, q, key_padding_mask=torch.zeros(1, 7)), "and sequences have 10 tokens"),
        (lambda a, q: MatMul(a.get_layout(16), BLOCK, "ddd"), "'sdd', 'dsd' or 'dds'"),
        (lambda a, q: MatMul(a.get_layout(16), BLOCK, "sdd", bench=True), "bench is true"),
        (lambda a, q: MatMul(a.get_layout(16), BLOCK, "sdd", trans_b=True)(q, q), r"expected 4 dims, 2 heads"),
        (lambda a, q: Softmax(a.get_layout(16), BLOCK)(q), "the blocks of the layout"),
    ],
)
def test_what_does_not_fit_is_refused(call, said):
    attention = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK, True), max_seq_length=32)
    with pytest.raises(UsageError, match=said):
        call(attention, torch.randn(1, HEADS, 10, 4))


def test_it_has_no_parameters():
    assert list(SparseSelfAttention(CONFIGS["fixed"]).parameters()) == []
    assert isinstance(SparseSelfAttention(CONFIGS["fixed"]), nn.Module)
