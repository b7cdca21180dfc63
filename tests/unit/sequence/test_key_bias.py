"""A bias of keys as one more column, against torch's attention with the same numbers in a mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deepspeed.sequence.key_bias import KeyBias
from deepspeed.sequence.order import TokenOrder


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("width", [5, 8, 128])
def test_attention_and_gradients(dtype, near, width):
    """Also where 16 bits do not hold the factor (the root of 128), and keys have fewer heads."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 32, width, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    values = (slopes[:, None] * torch.arange(32)).to(dtype)[None]
    scale = width**-0.5
    causal = torch.ones(32, 32, dtype=torch.bool).tril()
    expected = scaled_dot_product_attention(
        *(tensor.float() for tensor in tensors),
        attn_mask=values.float()[:, :, None].masked_fill(~causal, -torch.inf),
        scale=scale,
        enable_gqa=True,
    )
    for factor, bias in ((1 / scale, values), (1.0, values.float() / scale)):
        query, key, value = KeyBias(bias, factor).widen(*tensors)
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert query.shape[-1] % 8 == 0
        found = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)[..., :width]
        torch.testing.assert_close(found.float(), expected, atol=near, rtol=near)
        for mine, theirs in zip(
            torch.autograd.grad(found.float().square().sum(), tensors),
            torch.autograd.grad(expected.square().sum(), tensors, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs.to(dtype), atol=10 * near, rtol=10 * near)


def test_sixteen_bits_hold_biases_far_from_the_begin():
    """Neighbours' biases of 1,000 and 1,000.5 are the same number of 16 bits; the product tells them apart."""
    for dtype in (torch.bfloat16, torch.float16):
        values = 0.5 * torch.arange(1 << 15, 1 << 15 | 9).float()[None, None] / 7
        for times in (1.0, 128**0.5):
            query, key, _ = KeyBias(values, times).widen(*[torch.zeros(1, 1, 9, 4, dtype=dtype)] * 3)
            found = (query.double() @ key.double().transpose(2, 3))[0, 0]
            torch.testing.assert_close(found, (values * times).double()[0].expand(9, 9), rtol=1e-6, atol=0)


def test_parts():
    bias = KeyBias(torch.arange(3 * 16).view(1, 3, 16))
    assert bias.of_heads((2, 1), 1).values[0, :, 0].tolist() == [32]
    assert bias.last(2).values[0, :, 0].tolist() == [14, 30, 46]
    assert bias.on_ring(TokenOrder(1, 2), 1).values[0, 0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
