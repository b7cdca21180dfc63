"""What zero.Init takes and refuses, and what it makes of a config; no process group."""

from __future__ import annotations

import inspect

import pytest
import torch

from deepspeed import zero
from deepspeed.config.load import load
from deepspeed.errors import FeatureUnavailable, UsageError
from deepspeed.zero.birth import init
from deepspeed.zero.birth.placement import ConstructionSite, DeepSpeedTensorOverride

CPU = torch.device("cpu")
ALL = set(DeepSpeedTensorOverride)


def test_the_public_signature():
    parameters = inspect.signature(zero.Init.__init__).parameters
    defaults = {name: each.default for name, each in parameters.items() if name != "self"}
    assert list(defaults) == [
        "module",
        "data_parallel_group",
        "mem_efficient_linear",
        "remote_device",
        "pin_memory",
        "config_dict_or_path",
        "config",
        "enabled",
        "dtype",
        "mpu",
        "zero_param_parallel_group",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "sequence_data_parallel_group",
        "param_swapper",
        "tensor_overrides",
    ]
    assert defaults["enabled"] is True
    assert defaults["mem_efficient_linear"] is True
    assert list(defaults["tensor_overrides"]) == [DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device]


@pytest.mark.parametrize(
    "options",
    [
        {"zero_param_parallel_group": object()},
        {"param_swapper": object()},
    ],
)
def test_features_that_are_missing_are_named(options):
    with pytest.raises(FeatureUnavailable, match="not part of this version"):
        zero.Init(**options)
    zero.Init(enabled=False, **options)


def test_a_wrong_device_and_two_configs():
    with pytest.raises(UsageError, match="zero_quantized_weights in the config"):
        zero.Init(zero_quantized_weights=True)
    with pytest.raises(UsageError, match="zero_quantized_nontrainable_weights in the config"):
        zero.Init(zero_quantized_nontrainable_weights=True, config={"zero_optimization": {"stage": 3}})
    with pytest.raises(UsageError, match="remote_device is 'disk'"):
        zero.Init(remote_device="disk")
    with pytest.raises(UsageError, match="no folder is named"):
        zero.Init(remote_device="nvme")
    with pytest.raises(UsageError, match="both given"):
        zero.Init(config={}, config_dict_or_path={})


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (None, None, torch.float32),
        (None, torch.float16, torch.float16),
        ({}, torch.bfloat16, torch.bfloat16),
        ({"bf16": {"enabled": True}}, None, torch.bfloat16),
        ({"fp16": {"enabled": True}}, torch.bfloat16, torch.float16),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, None, torch.float32),
    ],
)
def test_the_dtype(config, dtype, expected):
    schema = None if config is None else load(config, partial=True).schema
    placement = init._placement(schema, dtype, CPU, ALL)
    assert (placement.dtype, placement.device) == (expected, CPU)


def test_overrides_choose():
    only = init._placement(None, None, CPU, {DeepSpeedTensorOverride.dtype})
    assert (only.dtype, only.device) == (torch.float32, None)
    neither = init._placement(None, torch.float16, CPU, set())
    assert (neither.dtype, neither.device) == (None, None)


def test_a_placement_keeps_objects_buffers_and_what_has_no_values():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LazyLinear(2))
    module.register_parameter("count", torch.nn.Parameter(torch.arange(3), requires_grad=False))
    module.register_parameter("later", torch.nn.Parameter(torch.empty(2, device="meta")))
    known = dict(module.named_parameters())
    fresh = dict(ConstructionSite(CPU, torch.bfloat16).put(module))
    assert set(known) - set(fresh) == {"2.weight", "2.bias", "later"}
    assert all(param is known[name] for name, param in fresh.items())
    dtypes = {name: param.dtype for name, param in fresh.items()}
    assert dtypes == {
        "0.weight": torch.bfloat16,
        "0.bias": torch.bfloat16,
        "1.weight": torch.float32,
        "1.bias": torch.float32,
        "count": torch.int64,
    }
    assert module[1].running_mean.dtype == torch.float32


def test_a_client_that_keeps_the_dtype_of_arange_finds_what_it_replaces():
    from deepspeed.runtime.zero import partition_parameters as old

    original = old.zero_wrapper_for_fp_tensor_constructor
    half = original(torch.arange, torch.bfloat16, target_device=CPU)
    assert half(3.0).dtype == torch.bfloat16
    assert half(3).dtype == torch.int64
    assert original(torch.zeros, torch.float16)(2, device="meta").device.type == "meta"

    def refused(*args, **kwargs):
        pytest.fail("zero.Init changes no factory function")

    old.zero_wrapper_for_fp_tensor_constructor = refused
    try:
        with ConstructionSite(CPU, torch.bfloat16).factories():
            assert torch.arange(3.0).dtype == torch.float32
    finally:
        old.zero_wrapper_for_fp_tensor_constructor = original
