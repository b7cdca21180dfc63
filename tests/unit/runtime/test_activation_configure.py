"""Where the settings come from, which comes first, and what does not fit together."""

from __future__ import annotations

import json

import pytest
import torch

from deepspeed.config import DeepSpeedConfig, load
from deepspeed.config.memory import ActivationCheckpointingConfig
from deepspeed.errors import DeepSpeedConfigError, LayoutError
from deepspeed.parallel import ParallelLayout
from deepspeed.runtime import rng
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.configuration import ARGUMENTS, CONFIGURATION, CheckpointingSettings


@pytest.fixture(autouse=True)
def fresh():
    CONFIGURATION.clear()
    yield
    CONFIGURATION.clear()
    rng.get_cuda_rng_tracker().reset()


class Mpu:
    def __init__(self, size=4, rank=1, spelling="tensor_model"):
        setattr(self, f"get_{spelling}_parallel_world_size", lambda: size)
        setattr(self, f"get_{spelling}_parallel_rank", lambda: rank)
        setattr(self, f"get_{spelling}_parallel_group", lambda: None)


def section(**values):
    return ActivationCheckpointingConfig(**values)


def settings():
    return CONFIGURATION.plan.settings


def test_every_key_of_the_section_is_a_setting():
    # one of them has no argument, and one is for layers that the engine finds
    assert {*ARGUMENTS, "keep_last_count"} == set(CheckpointingSettings.__dataclass_fields__)
    assert set(ActivationCheckpointingConfig.model_fields) == {
        *CheckpointingSettings.__dataclass_fields__,
        "layers_per_checkpoint",
    }


def test_defaults():
    assert not checkpointing.is_configured()
    assert settings() == CheckpointingSettings()


def test_arguments():
    checkpointing.configure(
        Mpu(),
        partition_activations=True,
        contiguous_checkpointing=True,
        num_checkpoints=3,
        checkpoint_in_cpu=True,
        synchronize=True,
        profile=True,
    )
    assert checkpointing.is_configured()
    assert settings() == CheckpointingSettings(True, True, True, 3, True, True)


@pytest.mark.parametrize("form", ["dict", "file", "config", "schema"])
def test_a_config_in_any_form(form, tmp_path):
    config = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    forms = {
        "dict": lambda: config,
        "file": lambda: str(tmp_path / "ds.json"),
        "config": lambda: DeepSpeedConfig(config),
        "schema": lambda: load(config).schema,
    }
    checkpointing.configure(None, deepspeed_config=forms[form](), profile=False)
    assert settings() == CheckpointingSettings(cpu_checkpointing=True)


def test_none_is_not_given():
    checkpointing.configure_from(section(cpu_checkpointing=True))
    checkpointing.configure(
        mpu_=None, partition_activations=None, contiguous_checkpointing=None, checkpoint_in_cpu=None, profile=None
    )
    assert settings() == CheckpointingSettings(cpu_checkpointing=True)


def test_the_section_of_an_engine_applies_and_arguments_come_first():
    checkpointing.configure_from(section(cpu_checkpointing=True, synchronize_checkpoint_boundary=True))
    assert settings() == CheckpointingSettings(cpu_checkpointing=True, synchronize_checkpoint_boundary=True)
    assert not checkpointing.is_configured()
    checkpointing.configure(None, checkpoint_in_cpu=False)
    assert settings() == CheckpointingSettings(synchronize_checkpoint_boundary=True)


def test_arguments_given_before_the_engine_exists_come_first_too():
    checkpointing.configure(Mpu(size=2), partition_activations=True)
    checkpointing.configure_from(section(partition_activations=False, profile=True), Mpu(size=4))
    assert settings() == CheckpointingSettings(partition_activations=True, profile=True)
    assert CONFIGURATION.plan.axis.size == 2


def test_an_engine_takes_back_what_it_said():
    first = checkpointing.configure_from(section(cpu_checkpointing=True))
    second = checkpointing.configure_from(section(cpu_checkpointing=False, profile=True))
    third = checkpointing.configure_from(section())
    assert settings() == CheckpointingSettings(profile=True)
    first()
    assert settings() == CheckpointingSettings(profile=True)
    second()
    second()
    third()
    assert settings() == CheckpointingSettings()


def test_an_engine_that_says_nothing_disturbs_no_other():
    checkpointing.configure_from(section(cpu_checkpointing=True))
    checkpointing.configure_from(section())
    assert settings() == CheckpointingSettings(cpu_checkpointing=True)


def test_each_call_of_configure_replaces_the_last():
    checkpointing.configure(Mpu(), checkpoint_in_cpu=True)
    checkpointing.configure(None, profile=True)
    assert settings() == CheckpointingSettings(profile=True)
    assert CONFIGURATION.plan.axis.size == 1


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"number_checkpoints": 2}, "partition_activations"),
        ({"partition_activations": True}, "number_checkpoints"),
        ({}, "partition_activations"),
    ],
)
def test_contiguous_needs_two_others(values, missing):
    checkpointing.configure(Mpu(), profile=True)
    with pytest.raises(DeepSpeedConfigError, match=rf"needs {missing} \({ARGUMENTS[missing]}=\)") as caught:
        checkpointing.configure_from(section(contiguous_memory_optimization=True, **values))
    assert caught.value.path == "activation_checkpointing.contiguous_memory_optimization"
    assert settings() == CheckpointingSettings(profile=True)
    with pytest.raises(DeepSpeedConfigError):
        checkpointing.configure(None, contiguous_checkpointing=True)
    assert settings() == CheckpointingSettings(profile=True)
    assert CONFIGURATION.plan.axis.size == 4


@pytest.mark.parametrize(
    ("argument", "value", "key"),
    [
        ("num_checkpoints", 0, "number_checkpoints"),
        ("num_checkpoints", True, "number_checkpoints"),
        ("partition_activations", 1, "partition_activations"),
        ("checkpoint_in_cpu", "yes", "cpu_checkpointing"),
    ],
)
def test_wrong_values_name_the_key_and_the_argument(argument, value, key):
    with pytest.raises(DeepSpeedConfigError, match=f"activation_checkpointing.{key} .argument {argument} of") as caught:
        checkpointing.configure(None, **{argument: value})
    assert repr(value) in str(caught.value)
    assert caught.value.path == f"activation_checkpointing.{key}"
    assert not checkpointing.is_configured()


def test_misspelt_keys_are_the_loaders_business():
    with pytest.raises(DeepSpeedConfigError, match="partition_activations"):
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"partition_activation": True}})


def test_set_num_layers_serves_until_configure_gives_a_number():
    checkpointing.set_num_layers(5)
    assert not checkpointing.is_configured()
    checkpointing.configure(Mpu(), partition_activations=True, contiguous_checkpointing=True)
    assert settings().number_checkpoints == 5
    checkpointing.configure(Mpu(), partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    assert settings().number_checkpoints == 2
    checkpointing.set_num_layers(7)
    assert settings().number_checkpoints == 7
    with pytest.raises(DeepSpeedConfigError, match="found 0"):
        checkpointing.set_num_layers(0)
    assert settings().number_checkpoints == 7


def test_partition_activations_in_checkpoint():
    checkpointing.configure(Mpu(), profile=True)
    checkpointing.partition_activations_in_checkpoint(True)
    assert settings() == CheckpointingSettings(partition_activations=True, profile=True)
    checkpointing.partition_activations_in_checkpoint(False)
    assert settings() == CheckpointingSettings(profile=True)


def test_reset_frees_the_buffers_and_keeps_the_configuration():
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    before = CONFIGURATION.plan.keeper
    checkpointing.reset()
    assert checkpointing.is_configured()
    assert settings().contiguous_memory_optimization
    assert CONFIGURATION.plan.keeper is not before


@pytest.mark.parametrize("spelling", ["tensor_model", "slice", "model"])
def test_spellings_of_an_mpu(spelling):
    checkpointing.configure(Mpu(size=3, rank=2, spelling=spelling))
    assert (CONFIGURATION.plan.axis.size, CONFIGURATION.plan.axis.rank) == (3, 2)


def test_a_grid_says_its_slices_not_its_stages():
    mpu = Mpu(size=8, rank=5, spelling="model")
    mpu.get_slice_parallel_world_size, mpu.get_slice_parallel_rank = (lambda: 2), (lambda: 1)
    checkpointing.configure(mpu)
    assert (CONFIGURATION.plan.axis.size, CONFIGURATION.plan.axis.rank) == (2, 1)


def test_a_layout_is_taken_too():
    with ParallelLayout.build(world=1, rank=0) as layout:
        checkpointing.configure_from(section(profile=True), layout)
        assert CONFIGURATION.plan.axis is layout["tp"]


def test_something_that_is_no_mpu():
    with pytest.raises(LayoutError, match="get_tensor_model_parallel_world_size"):
        checkpointing.configure(object())
    assert not checkpointing.is_configured()


def test_an_mpu_with_a_wrong_group():
    checkpointing.configure(Mpu())
    with pytest.raises(LayoutError, match=r"get_tensor_model_parallel_group\(\) gave a NoneType"):
        _ = CONFIGURATION.plan.axis.group


def test_seeds_follow_the_rank_of_the_mpu():
    checkpointing.configure(Mpu(rank=3))
    with torch.random.fork_rng(devices=[]):
        checkpointing.model_parallel_cuda_manual_seed(100)
        with checkpointing.get_cuda_rng_tracker().fork():
            drawn = torch.rand(3)
        checkpointing.model_parallel_reconfigure_tp_seed(100)
        with checkpointing.get_cuda_rng_tracker().fork():
            assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(100 + 2718 + 3)))
