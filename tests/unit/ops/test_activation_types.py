"""Names and numbers that model descriptions of others hold."""

from __future__ import annotations

from deepspeed.ops.activation_types import ActivationFuncType


def test_activation_names():
    assert [each.name for each in ActivationFuncType] == ["UNKNOWN", "GELU", "ReLU", "GATED_GELU", "GATED_SILU"]
    assert ActivationFuncType.GATED_SILU == 4
