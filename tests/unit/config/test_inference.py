"""The configs of inference: keys, their older names, assignments of other libraries, and what is wrong."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError
from torch import nn

from deepspeed.config.inference import (
    DeepSpeedInferenceConfig,
    DSStateManagerConfig,
    DtypeEnum,
    RaggedInferenceEngineConfig,
    idle_keys,
    read_inference_config,
)
from deepspeed.errors import DeepSpeedConfigError


def v1(config=None, **keys):
    return read_inference_config(DeepSpeedInferenceConfig, config, keys)


def test_older_keys():
    """They set what takes their place, and can be read and assigned."""
    config = v1({"mp_size": 2, "moe_type": "residual"}, ep_size=3)
    assert (config.tensor_parallel.tp_size, config.moe.ep_size, config.moe.type.value) == (2, 3, "residual")
    assert (config.mp_size, config.ep_size, config.moe_experts) == (2, 3, [1])
    config.mp_size = 4
    assert config.tensor_parallel.tp_size == 4
    assert DeepSpeedInferenceConfig(tensor_parallel={"tp_size": 5}).mp_size == 5
    with pytest.raises(DeepSpeedConfigError, match=r"both 'mp_size' and 'tensor_parallel\.tp_size' are given"):
        v1(mp_size=2, tp={"tp_size": 3})


def test_dtypes():
    for text in ("half", "torch.float16", "fp16", torch.float16):
        assert v1(dtype=text).dtype is torch.float16
    assert v1(dtype="bfloat").dtype is torch.bfloat16
    assert v1(dtype="int8").dtype is torch.int8
    assert DtypeEnum.from_str("float") is DtypeEnum.fp32
    with pytest.raises(DeepSpeedConfigError, match="'int7' is not a supported dtype"):
        v1(dtype="int7")


def test_arguments_over_a_config():
    assert v1({"max_tokens": 7}, max_out_tokens=7).max_out_tokens == 7
    with pytest.raises(ValueError, match="Conflicting argument 'max_out_tokens'"):
        v1({"max_tokens": 7}, max_out_tokens=8)
    assert v1({"dtype": "auto"}).dtype is torch.float16
    assert v1(moe=True).moe.enabled is True


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"replace_with_kernel_injec": True}, "did you mean 'replace_with_kernel_inject'"),
        ({"max_out_tokens": 0}, "greater than 0"),
        ({"min_out_tokens": 2000}, r"min_out_tokens \(2000\) is above"),
        ({"injection_policy": {3: "a"}}, "3 is no class"),
        ({"injection_policy": {nn.Linear: nn.Linear}}, "give the names of the linear layers"),
        ({"injection_policy": {nn.Linear: ("a",)}, "kernel_inject": True}, "give one of them"),
        ({"injection_policy": {nn.Linear: 3}}, "expected names of linear layers, found 3"),
        ({"quant": {"weight": {"num_bits": 3}}}, "quant.weight.num_bits"),
        ({"quant": {"weight": {"post_init_quant": {"mlp": {"num_bits": 5}}}}}, "post_init_quant.mlp.num_bits"),
        ({"quant": {"weight": {"post_init_quant": {"mlp": {"bits": 4}}}}}, "post_init_quant.mlp.bits"),
        ({"quant": {"weight": {"post_init_quant": {"mlp": {"group_size": 32}}}}}, "a multiple of 128"),
        ({"mpu": 3}, r"tensor_parallel.mpu: expected an object with get_model_parallel_group\(\), found 3"),
        ({"tp": {"tp_group": "x"}}, "tensor_parallel.tp_group: expected a process group, found 'x'"),
        ({"ragged": {"tp": {"tp_size": 2}}}, "ragged.tensor_parallel.tp_size is 2; of this config"),
    ],
)
def test_what_is_wrong(keys, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        v1(**keys)


def test_idle_keys():
    found = idle_keys(v1(dtype="fp16", triton_autotune=True, tp={"tp_grain_size": 32}))
    assert [line.partition(": no effect: ")[0] for line in found] == [
        "tensor_parallel.tp_grain_size",
        "triton_autotune",
    ]
    assert idle_keys(v1(triton_autotune=False)) == []
    of_files = {"base_dir": "x", "training_mp_size": 2, "checkpoint_config": {"base_dir": "x"}}
    assert [line.partition(":")[0] for line in idle_keys(v1(**of_files))] == [
        "base_dir",
        "checkpoint_config.base_dir",
        "training_mp_size",
    ]
    assert idle_keys(v1(**of_files, checkpoint="x")) == []


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        ({"zero": {"stage": 3, "offload_param": {"device": "cpu", "buffer_count": 3}}}, "offload_param.buffer_count"),
        ({"zero": {"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": 3}}}, "offload_param.max_in_cpu"),
        ({"zero": {"stage": 3, "reduce_bucket_size": 3, "offload_param": {"device": "cpu"}}}, "reduce_bucket_size"),
        ({"zero": {"stage": 2}}, "stage"),
    ],
)
def test_idle_keys_of_zero(keys, idle):
    assert [line.partition(": no effect: ")[0] for line in idle_keys(v1(keys))] == [f"zero.{idle}"]


def test_idle_budgets():
    assert len(idle_keys(v1(ragged={"memory": {"host": "1GB"}}))) == 1
    assert idle_keys(v1(ragged={"memory": {"host": "1GB", "device": 0}})) == []


def test_assignments_are_validated():
    config = RaggedInferenceEngineConfig(manager={"block_size": 16})
    config.tensor_parallel.tp_size = 2
    config.quantization.quantization_mode = "WF6AF16"
    assert config.quantization.quantization_mode == "wf6af16"
    with pytest.raises(ValidationError, match=r"above max_ragged_batch_size \(768\)"):
        config.state_manager.max_ragged_sequence_count = 1000
    assert config.state_manager.max_ragged_sequence_count == 512
    with pytest.raises(ValidationError, match="Extra inputs"):
        RaggedInferenceEngineConfig(cuda_graph=True)


def test_inside_of_another_librarys_config():
    class Outer(DeepSpeedConfigModel):
        engine: RaggedInferenceEngineConfig = {}  # noqa: RUF012

    outer = Outer(engine={"state_manager": {"block_size": 16}})
    outer.engine.tensor_parallel.tp_size = 3
    assert (outer.engine.state_manager.block_size, outer.engine.tensor_parallel.tp_size) == (16, 3)
    assert Outer().engine.tensor_parallel.tp_size == 1


def test_memory_of_the_host():
    assert DSStateManagerConfig(offload=True).host_bytes(100) == 100
    assert DSStateManagerConfig(offload=True, host_cache="1KB").host_bytes(100) == 1000
    assert DSStateManagerConfig().host_bytes(100) == 0


def test_speculation_needs_its_model():
    for wrong in ({"method": "draft"}, {"method": "ngram", "model": "path"}):
        with pytest.raises(DeepSpeedConfigError, match="'draft' needs model, 'ngram' has none"):
            read_inference_config(RaggedInferenceEngineConfig, {"speculative": wrong})
