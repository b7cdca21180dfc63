"""The section `weight_quantization`: what it says, and what it refuses."""

from __future__ import annotations

import pytest

from deepspeed import DeepSpeedConfig
from deepspeed.errors import DeepSpeedConfigError

BASE = {"train_batch_size": 1}
GROUPS = {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}


def of(stage=3, **section):
    return {**BASE, "zero_optimization": {"stage": stage}, "weight_quantization": section}


def test_what_is_asked_for():
    section = DeepSpeedConfig(of(quantized_initialization=GROUPS, post_init_quant={"fc": GROUPS})).schema
    at_birth = section.weight_quantization.at_birth
    assert at_birth is not None
    assert (at_birth.num_bits, at_birth.group_size, at_birth.symmetric) == (4, 64, False)
    assert list(section.weight_quantization.post_init_quant) == ["fc"]
    for off in ({"quantized_initialization": {}}, {"quantized_initialization": None}, {"enabled": False}):
        assert DeepSpeedConfig(of(0, **off)).schema.weight_quantization.at_birth is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            of(quantized_initialization={**GROUPS, "num_bits": 5}),
            "weight_quantization.quantized_initialization.num_bits",
        ),
        (of(quantized_initialization={**GROUPS, "group_size": 0}), "quantized_initialization.group_size"),
        (of(quantized_initialization={**GROUPS, "group_size": 3}), "group_size is 3 with num_bits 4"),
        (of(quantized_initialization={**GROUPS, "group_dim": 0}), "group_dim: shards are cut along rows, found 0"),
        (of(2, quantized_initialization=GROUPS), "quantized_initialization: zero.Init makes shards.* found stage 2"),
        (of(post_init_quant={"fc": {**GROUPS, "bits": 1}}), r"post_init_quant.fc.bits: unknown key"),
        (of(post_init_quant={"fc": 4}), "weight_quantization.post_init_quant.fc"),
    ],
)
def test_what_is_wrong(config, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        DeepSpeedConfig(config)
