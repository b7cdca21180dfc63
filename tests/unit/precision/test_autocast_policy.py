"""Autocast: the dtype, the context against an outer one, the classes and their parameters."""

import logging
import sys
import types

import pytest
import torch
from torch import nn

from deepspeed.config.precision import TorchAutocastConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import logger, warn_once
from deepspeed.precision.policy import SAFE_MODULES, AutocastPolicy, forward_context, resolve_modules


class Outer:
    class Inner(nn.Module):
        pass


class Special(nn.Linear):
    pass


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_off_is_no_policy():
    assert AutocastPolicy.from_config(TorchAutocastConfig(), "cpu") is None


@pytest.mark.parametrize(("name", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_forward_computes_in_the_dtype(name, dtype):
    policy = AutocastPolicy.from_config(TorchAutocastConfig(enabled=True, dtype=name), "cpu")
    assert policy == AutocastPolicy(dtype, SAFE_MODULES, "cpu")
    with forward_context(policy):
        assert product() == dtype
    assert product() == torch.float32
    assert name.replace("float", "fp").replace("bfp", "bf") in policy.describe()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_dtype_torch_decides(device):
    policy = AutocastPolicy.from_config(TorchAutocastConfig(enabled=True), device)
    assert policy.dtype == torch.get_autocast_dtype(device)
    assert policy.device_type == device


def test_fp32_is_refused():
    with pytest.raises(DeepSpeedConfigError, match=r"torch_autocast\.dtype: fp32") as caught:
        AutocastPolicy.from_config(TorchAutocastConfig(enabled=True, dtype="fp32"), "cpu")
    assert caught.value.path == "torch_autocast.dtype"


@pytest.fixture
def warnings(caplog):
    warn_once.cache_clear()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_an_outer_autocast_is_replaced(warnings):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with forward_context(AutocastPolicy(torch.float16)):
            assert product() == torch.float16
        assert product() == torch.bfloat16
    assert "with bf16" in warnings.text


def test_an_outer_autocast_is_off_where_the_config_has_none(warnings):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            with forward_context(None, "cpu"):
                assert product() == torch.float32
        assert product() == torch.bfloat16
    assert warnings.text.count("torch_autocast.enabled") == 2, "both in one message, told once"


def test_no_autocast_anywhere_is_free():
    context = forward_context(None, "cpu")
    assert type(context).__name__ == "nullcontext"


def test_the_default_device_is_the_accelerators():
    with torch.autocast("cpu", dtype=torch.bfloat16), forward_context(None):
        assert product() == torch.float32


def test_classes_are_found_by_name(monkeypatch):
    assert resolve_modules(["torch.nn.Linear", "torch.nn.modules.sparse.Embedding"]) == (nn.Linear, nn.Embedding)
    home = types.ModuleType("home_of_classes")
    home.Outer = Outer
    monkeypatch.setitem(sys.modules, "home_of_classes", home)
    assert resolve_modules(["home_of_classes.Outer.Inner"]) == (Outer.Inner,)
    assert resolve_modules([]) == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch.nn.Liner", "cannot be imported"),
        ("no_such_package.Linear", "No module named 'no_such_package'"),
        ("Linear", "not a fully qualified"),
        ("torch..Linear", "not a fully qualified"),
        ("", "not a fully qualified"),
        ("torch.nn.functional.linear", "no subclass"),
        ("torch.optim.SGD", "no subclass"),
    ],
)
def test_a_wrong_name_is_an_error_with_its_place(name, text):
    section = TorchAutocastConfig(enabled=True, dtype="bf16", lower_precision_safe_modules=["torch.nn.Linear", name])
    with pytest.raises(DeepSpeedConfigError, match=text) as caught:
        AutocastPolicy.from_config(section, "cpu")
    assert caught.value.path == "torch_autocast.lower_precision_safe_modules[1]"


def test_parameters_of_exactly_these_classes_travel_in_the_dtype():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(2, 2),
            "conv": nn.Conv2d(1, 1, 1),
            "special": Special(2, 2),
            "norm": nn.LayerNorm(2),
            "attention": nn.MultiheadAttention(2, 1),
        }
    )
    found = AutocastPolicy(torch.bfloat16).communication_dtypes(model)
    names = {name for name, parameter in model.named_parameters() if parameter in found}
    assert names == {"linear.weight", "linear.bias", "conv.weight", "conv.bias"}
    assert set(found.values()) == {torch.bfloat16}
    only = AutocastPolicy(torch.bfloat16, (nn.LayerNorm,)).communication_dtypes(model)
    assert {name for name, each in model.named_parameters() if each in only} == {"norm.weight", "norm.bias"}


def test_a_tied_parameter_counts_once_and_is_not_marked():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    found = AutocastPolicy(torch.float16).communication_dtypes(model)
    assert found == {model[0].weight: torch.float16}
    assert vars(model[0].weight) == {}
