"""`DeepSpeedConfig`: batch sizes for the real number of data-parallel ranks, and the attribute names scripts read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.deepspeed_config import ATTRIBUTES
from deepspeed.config.features import UNBUILT
from deepspeed.config.model import walk
from deepspeed.config.schema import Schema
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError, FeatureUnavailable

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "fp16": {"enabled": True, "initial_scale_power": 8},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"tag_validation": "fail"},
    "csv_monitor": {"enabled": True},
}


def test_batch_sizes_follow_the_world():
    config = DeepSpeedConfig(CONFIG, world_size=4)
    assert (config.train_batch_size, config.world_size) == (24, 4)
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.gradient_accumulation_steps == 3
    assert DeepSpeedConfig(CONFIG).train_batch_size == 6


def test_the_mpu_says_how_many_ranks_share_the_batch():
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 5)
    assert DeepSpeedConfig(CONFIG, mpu=mpu, world_size=10).train_batch_size == 30
    ulysses = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    assert DeepSpeedConfig(CONFIG, mpu=ulysses, world_size=8).train_batch_size == 24
    with pytest.raises(DeepSpeedConfigError, match="world size 9 is not divisible by the mpu's"):
        DeepSpeedConfig(CONFIG, mpu=ulysses, world_size=9)


def test_a_mesh_says_how_many_ranks_share_the_batch():
    mesh = {"data_parallel": SimpleNamespace(size=lambda: 3)}
    assert DeepSpeedConfig(CONFIG, mesh_device=mesh, world_size=6).train_batch_size == 18


def test_the_number_of_data_parallel_ranks_may_be_stated():
    assert DeepSpeedConfig({**CONFIG, "data_parallel_size": 2}, world_size=2).train_batch_size == 12
    with pytest.raises(DeepSpeedConfigError, match="data_parallel_size is 4, but 2 ranks are data-parallel here"):
        DeepSpeedConfig({**CONFIG, "data_parallel_size": 4}, world_size=2)
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 2)
    assert DeepSpeedConfig({**CONFIG, "data_parallel_size": 2}, mpu=mpu, world_size=8).world_size == 2


def test_notes_name_keys_that_have_no_effect_here():
    def notes(**keys):
        return DeepSpeedConfig({**CONFIG, **keys}).notes

    assert notes() == []
    assert notes(tensor_parallel={"autotp_size": 1, "preset_model": "llama", "tp": {"tp_grain_size": 1}}) == [
        "tensor_parallel.preset_model: no effect: tensor_parallel.autotp_size is below 2, so that layers are not split"
    ]
    assert "data_efficiency.enabled" in notes(data_efficiency={"enabled": True})[0]
    assert notes(data_efficiency={"enabled": False, "seed": 3}) == [], "a section that is off says so itself"
    assert notes(zero_optimization={"stage": 2, "allgather_partitions": True}) == [], "the default asks for nothing"
    assert "allgather_partitions" in notes(zero_optimization={"stage": 2, "allgather_partitions": False})[0]
    assert notes(zero_optimization=True, allgather_size=10) == [], "there it has its effect"
    assert "allgather_size" in notes(allgather_size=10)[0]
    assert "mpu" in notes(tensor_parallel={"tp": {"mpu": object()}})[0]


def test_a_wrong_batch_is_an_assertion_error_too():
    with pytest.raises(AssertionError, match=r"16 != 2 \* 3 \* 4 = 24"):
        DeepSpeedConfig({**CONFIG, "train_batch_size": 16}, world_size=4)
    with pytest.raises(AssertionError, match="at least 1"):
        DeepSpeedConfig({"train_batch_size": 0})
    with pytest.raises(AssertionError):
        DeepSpeedConfig({"train_batch_size": "eight"})
    with pytest.raises(BatchSizeError):
        DeepSpeedConfig({})


def test_a_partial_config_needs_no_batch():
    config = DeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}, partial=True)
    assert config.train_batch_size is None
    assert config.zero_optimization_stage == 3


def test_older_names():
    config = DeepSpeedConfig(CONFIG)
    assert config.zero_config is config.schema.zero_optimization
    assert config.zero_enabled
    assert config.fp16_enabled
    assert not config.bfloat16_enabled
    assert config.initial_dynamic_scale == 256
    assert config.dynamic_loss_scale_args["init_scale"] == 256
    assert config.optimizer_name == "adam"
    assert config.optimizer_params == {"lr": 0.1}
    assert config.scheduler_name == "WarmupLR"
    assert config.checkpoint_tag_validation_fail
    assert config.monitor_config.csv_monitor.enabled
    assert config.monitor_config.enabled
    assert config.comms_config is not None
    assert config.gradient_clipping == 1.0
    assert config._param_dict == CONFIG
    assert not hasattr(config, "no_such_attribute")


def test_torch_optimizer_names_keep_their_case():
    config = DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1}}})
    assert config.optimizer_name == "SGD"


def test_every_older_name_resolves():
    config = DeepSpeedConfig({"train_batch_size": 1})
    for name in ATTRIBUTES:
        getattr(config, name)


def test_every_unbuilt_feature_names_a_key_of_the_schema():
    paths = {path for path, _ in walk(Schema)}
    assert [feature.path for feature in UNBUILT if feature.path not in paths] == []
    plain = DeepSpeedConfig({"train_batch_size": 1}).schema
    assert [feature.path for feature in UNBUILT if feature.asked(plain)] == []


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"compile": {"deepcompile": True, "symmetric_memory": True}}, "compile.symmetric_memory"),
        ({"graph_harvesting": True}, "graph_harvesting"),
    ],
)
def test_an_enabled_feature_that_is_not_built_is_an_error_that_says_so(section, path):
    with pytest.raises(FeatureUnavailable, match="not part of this version") as caught:
        DeepSpeedConfig({"train_batch_size": 8, **section})
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("section", "package", "instead"),
    [
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "apex", "bf16, fp16 or torch_autocast"),
        ({"nebula": {"enabled": True}}, "torch_nebula", "checkpoint.writer.decoupled"),
        ({"datastates_ckpt": {"host_cache_size": 16}}, "datastates", "engine.checkpoint_engine"),
    ],
)
@pytest.mark.parametrize("installed", [False, True])
def test_software_of_others_is_named_with_what_does_the_same(section, package, instead, installed, monkeypatch):
    monkeypatch.setattr("deepspeed.config.features.find_spec", lambda name: name == package if installed else None)
    with pytest.raises(FeatureUnavailable) as caught:
        DeepSpeedConfig({"train_batch_size": 8, **section})
    assert f"the package {package}, which {'is' if installed else 'is not'} installed here" in str(caught.value)
    assert instead in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_disabled_section_of_an_unbuilt_feature_loads():
    sections = ("elasticity", "hybrid_engine", "autotuning", "flops_profiler", "amp", "nebula", "eigenvalue")
    DeepSpeedConfig({"train_batch_size": 1, **{name: {"enabled": False} for name in sections}})
