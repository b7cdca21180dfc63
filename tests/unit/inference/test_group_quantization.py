"""Published layers with weights in few bits."""

from __future__ import annotations

import pytest
import torch
from deepspeed.inference.quantization.layers import QuantizedEmbedding, QuantizedLinear
from deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization
from deepspeed.inference.quantization.utils import DeQuantizer, Quantizer
from torch import nn

from deepspeed.errors import UsageError


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_layers(bits, size, dim):
    torch.manual_seed(0)
    config = {"num_bits": bits, "group_size": size, "group_dim": dim, "symmetric": False}
    model = nn.Sequential(nn.Embedding(128, 256), nn.Linear(256, 128))
    x = torch.randint(0, 128, (3, 5))
    expected = model(x)
    weight = model[1].weight.detach()
    made = _init_group_wise_weight_quantization(
        model, {"weight_quantization": {"post_init_quant": {"0": config, "1": config}}}
    )
    assert made is model
    assert isinstance(model[0], QuantizedEmbedding)
    assert isinstance(model[1], QuantizedLinear)
    assert not list(model[0].parameters())
    torch.testing.assert_close(model(x), expected, atol=0.02 if bits == 8 else 0.4, rtol=0)
    held = model[1].weight_numbers
    assert held.numel() == weight.numel() * bits // 8
    numbers, scale, low = Quantizer(config).quantize(weight)
    step = (weight.max() - weight.min()) / (2**bits - 1)
    torch.testing.assert_close(
        DeQuantizer(config, torch.float32).dequantize(numbers, scale, low), weight, atol=float(step), rtol=0
    )
    assert model.half()(x).dtype is torch.float16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_bits": 5, "group_size": 2}, "num_bits is 5, expected 4 or 8"),
        ({"num_bits": 8, "group_size": 3}, "group_size is 3, which does not divide dim 1 of"),
        ({"num_bits": 8, "group_size": 2, "symmetric": True}, "symmetric is true"),
        ({"num_bits": 8, "group_size": 0}, "group_size is 0"),
        ({"num_bits": 4, "group_size": 1}, "group_size is 1 .*even for 4 bits"),
        ({"num_bits": 8, "group_size": 2, "bits": 1}, "not bits"),
    ],
)
def test_what_is_wrong(config, message):
    with pytest.raises(UsageError, match=message):
        QuantizedLinear(config, nn.Linear(4, 4))


def test_a_layer_that_two_parts_match():
    config = {"num_bits": 8, "group_size": 2}
    with pytest.raises(UsageError, match="matches 'fc' and 'c1'"):
        _init_group_wise_weight_quantization(
            nn.ModuleDict({"fc1": nn.Linear(4, 4)}),
            {"weight_quantization": {"post_init_quant": {"fc": config, "c1": config}}},
        )
