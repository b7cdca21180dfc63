"""fp16, bf16, torch_autocast, data_types, amp."""

import math

import pytest
from pydantic import ValidationError

from deepspeed.config.precision import (
    DataTypesConfig,
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    TorchAutocastConfig,
)


def refused(model, **values):
    with pytest.raises(ValidationError) as caught:
        model(**values)
    return str(caught.value)


def test_fp16_defaults():
    assert DeepSpeedFP16Config().model_dump() == {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    }
    assert DeepSpeedFP16Config().dynamic
    assert not DeepSpeedFP16Config(loss_scale=128).dynamic


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, True, "much"])
def test_a_loss_scale_is_a_finite_number_from_zero(value):
    assert "loss_scale" in refused(DeepSpeedFP16Config, loss_scale=value)


def test_numbers_may_come_as_text():
    assert DeepSpeedFP16Config(loss_scale="128", initial_scale_power="8").loss_scale == 128


@pytest.mark.parametrize("key", ["loss_scale_window", "hysteresis", "min_loss_scale"])
def test_the_dynamic_scale_needs_positive_settings(key):
    assert f"{key} must be at least 1 with a dynamic loss scale, found 0" in refused(
        DeepSpeedFP16Config, enabled=True, **{key: 0}
    )
    DeepSpeedFP16Config(enabled=False, **{key: 0})
    DeepSpeedFP16Config(enabled=True, loss_scale=64, **{key: 0})
    assert key in refused(DeepSpeedFP16Config, **{key: True})
    assert key in refused(DeepSpeedFP16Config, **{key: 1.5})


def test_all_problems_of_a_section_are_told_at_once():
    text = refused(DeepSpeedFP16Config, enabled=True, hysteresis=0, min_loss_scale=-1)
    assert "hysteresis" in text
    assert "min_loss_scale" in text


def test_bf16_defaults_and_the_states_need_the_masters():
    assert DeepSpeedBF16Config().check_grad_overflow is True
    assert DeepSpeedBF16Config().immediate_grad_update is False
    assert "bf16_master_weights_and_grads is false" in refused(DeepSpeedBF16Config, bf16_optimizer_states=True)
    DeepSpeedBF16Config(bf16_optimizer_states=True, bf16_master_weights_and_grads=True)


@pytest.mark.parametrize(
    ("given", "short"),
    [
        *((name, "fp16") for name in ("fp16", "float16", "half", "torch.float16", "torch.half", "FP16")),
        *((name, "bf16") for name in ("bf16", "bfloat16", "torch.bfloat16")),
        *((name, "fp32") for name in ("fp32", "float32", "float", "torch.float32")),
    ],
)
def test_a_dtype_has_many_names_and_one_short_one(given, short):
    assert TorchAutocastConfig(dtype=given).dtype == short
    assert DataTypesConfig(grad_accum_dtype=given).grad_accum_dtype == short


def test_a_torch_dtype_itself_is_a_dtype():
    torch = pytest.importorskip("torch")
    assert DataTypesConfig(buffer_dtype=torch.bfloat16).buffer_dtype == "bf16"


@pytest.mark.parametrize("value", ["int8", "fp8", "none", 16, True, ["fp16"]])
def test_what_is_no_floating_dtype_is_refused_with_the_choices(value):
    text = refused(TorchAutocastConfig, dtype=value)
    assert "is not a supported dtype; use fp16" in text


def test_a_bare_string_is_not_a_list_of_modules():
    text = refused(TorchAutocastConfig, lower_precision_safe_modules="torch.nn.Linear")
    assert 'write ["torch.nn.Linear"]' in text
    assert TorchAutocastConfig(lower_precision_safe_modules=["a.B"]).lower_precision_safe_modules == ["a.B"]


def test_keep_in_fp32_modules_is_auto_or_a_list():
    assert DataTypesConfig().keep_in_fp32_modules == "auto"
    assert DataTypesConfig(keep_in_fp32_modules=[]).keep_in_fp32_modules == []
    for value in (None, "rotary", [1], 3):
        assert 'expected "auto" or a list' in refused(DataTypesConfig, keep_in_fp32_modules=value)
