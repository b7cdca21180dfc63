"""From a config to dtypes and a loss scale."""

import warnings

import pytest
import torch
from torch import nn

from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.config import load
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.precision.cast import BufferRule
from deepspeed.precision.policy import Precision, make_scale
from deepspeed.precision.scale import DynamicScale, NoScale, StaticScale

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ON = {"enabled": True}
ZERO = {"zero_optimization": {"stage": 1}}
OFFLOAD = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}


def precision(config=None, **keywords):
    return Precision.from_config(load({"train_batch_size": 1, **(config or {})}).schema, device_type="cpu", **keywords)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (FP32, FP32, FP32, FP32, FP32, True)),
        ({"bf16": ON}, (BF16, FP32, BF16, BF16, FP32, True)),
        ({"bfloat16": ON}, (BF16, FP32, BF16, BF16, FP32, True)),
        ({"bf16": {**ON, "check_grad_overflow": False}}, (BF16, FP32, BF16, BF16, FP32, False)),
        ({"bf16": {**ON, "bf16_master_weights_and_grads": True}, **OFFLOAD}, (BF16, BF16, BF16, BF16, FP32, True)),
        (
            {"bf16": {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, **ZERO},
            (BF16, BF16, BF16, BF16, BF16, True),
        ),
        ({"fp16": ON}, (FP16, FP32, FP16, FP16, FP32, True)),
        ({"fp16": {**ON, "loss_scale": 128}}, (FP16, FP32, FP16, FP16, FP32, True)),
        ({"fp16": {**ON, "fp16_master_weights_and_grads": True}, **OFFLOAD}, (FP16, FP16, FP16, FP16, FP32, True)),
        ({"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}}, (BF16, FP32, FP32, BF16, FP32, True)),
        ({"fp16": ON, "data_types": {"grad_accum_dtype": "float32"}}, (FP16, FP32, FP32, FP16, FP32, True)),
        ({"bf16": ON, "data_types": {"grad_accum_dtype": "bf16"}}, (BF16, FP32, BF16, BF16, FP32, True)),
        ({"bf16": ON, "communication_data_type": "fp32"}, (BF16, FP32, BF16, FP32, FP32, True)),
        ({"communication_data_type": "bf16"}, (FP32, FP32, FP32, BF16, FP32, True)),
        ({"torch_autocast": {**ON, "dtype": "bf16"}}, (FP32, FP32, FP32, FP32, FP32, True)),
        ({"torch_autocast": {**ON, "dtype": "fp16"}}, (FP32, FP32, FP32, FP32, FP32, True)),
        # A section that is off changes nothing, whatever it says.
        ({"bf16": {"enabled": False, "check_grad_overflow": True}}, (FP32, FP32, FP32, FP32, FP32, True)),
        (
            {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}, "fp16": ON, **ZERO},
            (FP16, FP32, FP16, FP16, FP32, True),
        ),
        ({"fp16": {"fp16_master_weights_and_grads": True}, "bf16": ON, **ZERO}, (BF16, FP32, BF16, BF16, FP32, True)),
    ],
    ids=str,
)
def test_dtypes_by_role(config, expected):
    found = precision(config)
    roles = (found.param, found.master, found.accumulate, found.reduce, found.state, found.check_overflow)
    assert roles == expected
    assert found.has_master == (found.master != found.param)


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        ({"bf16": ON}, 1, BF16),
        ({"bf16": ON}, 2, FP32),
        ({"bf16": ON, "communication_data_type": "bf16"}, 2, BF16),
        ({"bf16": ON, "seq_parallel_communication_data_type": "fp16"}, 2, FP16),
        ({"bf16": ON, "seq_parallel_communication_data_type": None}, 2, BF16),
        ({"bf16": ON, "seq_parallel_communication_data_type": "fp16"}, 1, BF16),
    ],
    ids=str,
)
def test_split_sequences_reduce_in_their_own_dtype_unless_one_is_given(config, size, expected):
    assert precision(config, sequence_size=size).reduce == expected


def test_the_config_may_say_that_sequences_are_split():
    schema = Schema(train_batch_size=1, bf16=ON, sequence_parallel_size=2)
    assert Precision.from_config(schema).reduce == FP32
    assert Precision.from_config(schema, sequence_size=1).reduce == BF16


@pytest.mark.parametrize(
    ("config", "accumulate"),
    [({}, "bf16"), ({}, "fp16"), ({"bf16": ON}, "fp16"), ({"fp16": ON}, "bf16")],
    ids=str,
)
def test_accumulation_that_loses_is_refused(config, accumulate):
    with pytest.raises(DeepSpeedConfigError, match=r"use .*fp32") as caught:
        precision({**config, "data_types": {"grad_accum_dtype": accumulate}})
    assert caught.value.path == "data_types.grad_accum_dtype"


@pytest.mark.parametrize(("config", "dtype"), [({}, "bf16"), ({"bf16": ON}, "fp32"), ({"fp16": ON}, "bf16")], ids=str)
def test_param_dtype_must_be_the_training_dtype(config, dtype):
    with pytest.raises(DeepSpeedConfigError, match=r"data_types\.param_dtype"):
        precision({**config, "data_types": {"param_dtype": dtype}})


def test_param_dtype_that_is_right():
    assert precision({"bf16": ON, "data_types": {"param_dtype": "bfloat16"}}).param == BF16


def test_buffers_and_inputs():
    found = precision({"fp16": {**ON, "auto_cast": True}, "data_types": {"buffer_dtype": "fp16"}})
    assert found.buffers == BufferRule(FP16, None)
    assert found.inputs == FP16
    assert precision({"data_types": {"keep_in_fp32_modules": ["a*"]}}).buffers == BufferRule(None, ("a*",))
    assert precision({"data_types": {"keep_in_fp32_modules": []}}).buffers == BufferRule(None, ())
    assert precision({"fp16": {"auto_cast": True}}).inputs is None, "only with fp16 on"
    assert precision({"fp16": ON}).inputs is None


def test_cast_inputs():
    x = torch.ones(2)
    args, kwargs = (x,), {"x": x}
    same = precision().cast_inputs(args, kwargs)
    assert same[0] is args
    assert same[1] is kwargs
    (cast,), named = precision({"fp16": {**ON, "auto_cast": True}}).cast_inputs(args, kwargs)
    assert cast.dtype == named["x"].dtype == FP16


def test_cast_module_follows_the_policy():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("table", torch.ones(2))
    precision({"bf16": ON, "data_types": {"buffer_dtype": "bf16"}}).cast_module(model)
    assert (model[0].weight.dtype, model.table.dtype) == (BF16, BF16)


def test_forward_context():
    with precision({"torch_autocast": {**ON, "dtype": "bf16"}}).forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == BF16
    with torch.autocast("cpu", dtype=BF16), precision().forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FP32


def test_reduce_dtypes():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    autocast = {"torch_autocast": {**ON, "dtype": "bf16"}}
    assert precision().reduce_dtypes(model) == {}
    assert {id(each) for each in precision(autocast).reduce_dtypes(model)} == {
        id(each) for each in model[0].parameters()
    }
    assert precision({**autocast, "communication_data_type": "fp32"}).reduce_dtypes(model) == {}


class Device(CPU_Accelerator):
    def is_fp16_supported(self):
        return False


@pytest.mark.parametrize(
    ("config", "key"),
    [({"fp16": ON}, "fp16.enabled"), ({"torch_autocast": {**ON, "dtype": "fp16"}}, "torch_autocast.dtype")],
    ids=str,
)
def test_a_device_without_the_dtype(config, key):
    with pytest.raises(DeepSpeedConfigError, match="does not compute in fp16") as caught:
        precision(config).require_device(Device())
    assert caught.value.path == key
    assert isinstance(caught.value, ValueError)
    precision({"bf16": ON}).require_device(Device())
    precision().require_device()


@pytest.mark.parametrize("slow", ["mm", "bmm"])
def test_a_cpu_without_fast_products_is_told_in_one_line(slow, monkeypatch, recwarn):
    told = []
    product = getattr(torch, slow)

    def warns(*args):
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: \n" + "frame #1\n" * 30, stacklevel=1)
        return product(*args)

    monkeypatch.setattr("deepspeed.precision.policy.log_dist_once", lambda text, level: told.append(text))
    precision({"bf16": ON}).require_device(CPU_Accelerator())
    before = len(told)  # by the machine's own CPU
    monkeypatch.setattr(torch, slow, warns)
    precision().require_device(CPU_Accelerator())
    precision({"bf16": ON}).require_device(CPU_Accelerator())
    precision({"torch_autocast": {**ON, "dtype": "bf16"}}).require_device(CPU_Accelerator())
    assert [text.partition(":")[0] for text in told[before:]] == ["bf16.enabled", "torch_autocast.dtype"]
    assert "no fast bf16 products" in told[-1]
    assert "frame" not in told[-1]
    assert len(recwarn) == 0


def test_it_describes_itself_in_one_line():
    assert precision({"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}}).describe() == (
        "bf16 parameters, fp32 master weights, gradients accumulated in fp32 and reduced in bf16, fp32 optimizer "
        "state, steps with inf or NaN gradients skipped"
    )
    text = precision({"torch_autocast": {**ON, "dtype": "bf16"}}).describe()
    assert "no separate master weights" in text
    assert "autocast to bf16 on cpu" in text
    assert text.endswith("steps with inf or NaN gradients skipped")
    assert "inputs cast to fp16" in precision({"fp16": {**ON, "auto_cast": True}}).describe()


# ---- the loss scale -------------------------------------------------------------------------------------------------


def scale(config=None):
    schema = load({"train_batch_size": 1, **(config or {})}).schema
    return make_scale(schema, Precision.from_config(schema, device_type="cpu"))


@pytest.mark.parametrize(
    "config",
    [{}, {"bf16": ON}, {"fp16": {"loss_scale": 8}}, {"torch_autocast": {**ON, "dtype": "bf16"}}],
    ids=str,
)
def test_the_loss_is_not_scaled(config):
    assert isinstance(scale(config), NoScale)


def test_a_static_scale():
    found = scale({"fp16": {**ON, "loss_scale": 128}})
    assert isinstance(found, StaticScale)
    assert found.value == 128


def test_a_dynamic_scale_has_the_settings_of_its_section():
    default = scale({"fp16": ON})
    assert isinstance(default, DynamicScale)
    assert (default.value, default.window, default.hysteresis) == (65536, 1000, 2)
    assert (default.consecutive_hysteresis, default.minimum, default.raise_at_minimum) == (False, 1, True)
    keys = {"initial_scale_power": 8, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 4}
    given = scale({"fp16": {**ON, **keys, "consecutive_hysteresis": True}})
    assert (given.value, given.window, given.hysteresis) == (256, 7, 3)
    assert (given.consecutive_hysteresis, given.minimum) == (True, 4)


@pytest.mark.parametrize("extra", [{}, {"bf16": ON}], ids=str)
def test_fp16_autocast_has_the_settings_of_grad_scaler(extra):
    found = scale({"torch_autocast": {**ON, "dtype": "fp16"}, "fp16": {"loss_scale": 8}, **extra})
    theirs = torch.amp.GradScaler("cpu")
    assert isinstance(found, DynamicScale)
    assert (found.value, found.window) == (theirs.get_scale(), theirs.get_growth_interval())
    assert (found.factor, 1 / found.factor) == (theirs.get_growth_factor(), theirs.get_backoff_factor())
    assert (found.hysteresis, found.minimum) == (1, torch.finfo(FP32).tiny)


def test_fp16_training_under_fp16_autocast_obeys_the_fp16_section():
    assert scale({"fp16": {**ON, "loss_scale": 8}, "torch_autocast": {**ON, "dtype": "fp16"}}).value == 8


def test_a_start_below_the_minimum_names_the_keys():
    with pytest.raises(DeepSpeedConfigError, match=r"fp16\.initial_scale_power, fp16\.min_loss_scale: .* 2\^2 = 4"):
        scale({"fp16": {**ON, "initial_scale_power": 2, "min_loss_scale": 8}})


def test_the_policy_is_made_if_it_is_not_given():
    assert make_scale(load({"train_batch_size": 1, "fp16": ON}).schema).value == 65536
    assert make_scale(load({"train_batch_size": 1}).schema).value == 1


def test_every_scale_is_new():
    config = {"fp16": ON}
    assert scale(config) is not scale(config)
