"""The layer of BERT on a device, beside a plain one there."""

import pytest
import torch

from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
AGAIN = {"normalize_invertible": True, "gelu_checkpoint": True, "attn_dropout_checkpoint": True}


def layer_of(dtype, device, **options):
    torch.manual_seed(0)
    config = DeepSpeedTransformerConfig(
        hidden_size=256, heads=4, num_hidden_layers=2, initializer_range=0.1, attn_dropout_ratio=0.0,
        hidden_dropout_ratio=0.0, **options,
    )  # fmt: skip
    return DeepSpeedTransformerLayer(config).to(device, dtype)


@needs_cuda
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, AGAIN], ids=["kept", "again"])
def test_a_device_computes_what_the_host_does(first, dtype, options):
    mask = torch.zeros(2, 1, 1, 64)
    mask[1, ..., 50:] = -10000.0
    x, pull = (torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found = []
    for device, width in (("cpu", torch.float32), ("cuda", dtype)):
        layer = layer_of(width, device, pre_layer_norm=first, **options)
        inputs = x.clone().to(device, width).requires_grad_()
        out = layer(inputs, mask.to(device))
        (out.float() * pull.to(device)).mean().backward()  # the squares of what a norm gives have a constant sum
        found.append([out, inputs.grad, *(param.grad for param in layer.parameters())])
    close = 2e-3 if dtype is torch.float32 else 0.1
    for one, two in zip(*found, strict=True):
        size = one.abs().max().clamp(min=1e-12)
        torch.testing.assert_close(two.float().cpu() / size, one.float() / size, rtol=close, atol=close)
