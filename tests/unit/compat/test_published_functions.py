"""Functions and lists that only scripts use."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply

import deepspeed
from deepspeed.launcher import environment, runner
from deepspeed.runtime.activation_checkpointing import checkpointing
from tests.harness import ranks


def test_multi_tensor_apply_hands_its_chunk_size_on():
    seen = MultiTensorApply(2048)(lambda *args: args, torch.zeros(1), [[torch.ones(2)]], 0.5)
    assert seen[0] == 2048
    assert seen[3] == 0.5


def test_random_states_of_activation_checkpointing():
    tracker = checkpointing._CUDA_RNG_STATE_TRACKER
    assert tracker is checkpointing.get_cuda_rng_tracker()
    assert checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME == "model-parallel-rng"
    state = torch.get_rng_state()
    first = torch.rand(3)
    checkpointing._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_exported_variables_are_a_list_that_scripts_extend(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "EXPORT_ENVS", list(environment.EXPORT_ENVS))
    vars(runner).pop("EXPORT_ENVS", None)
    runner.EXPORT_ENVS.append("MYLAB_")
    found = environment.exported({"MYLAB_A": "1", "OTHER": "2"}, (), [tmp_path])
    vars(runner).pop("EXPORT_ENVS", None)
    assert found["MYLAB_A"] == "1"
    assert "OTHER" not in found
    assert runner.DLTS_HOSTFILE == "/job/hostfile"
    assert runner.DEEPSPEED_ENVIRONMENT_PATHS[-1] == "."


def test_version_is_text():
    assert deepspeed.version == deepspeed.__version__


def test_names_to_come_are_told_apart_from_a_broken_installation():
    assert not hasattr(deepspeed.runtime, "compression")
    with pytest.raises(AttributeError, match=r"runtime.compression is not part of this version yet; until then"):
        deepspeed.runtime.compression  # noqa: B018
    for name in ("deepspeed.runtime.compression", "deepspeed.runtime.compression.below"):
        with pytest.raises(ImportError, match=r"runtime\.compression[.\w]* is not part of this version yet"):
            importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'deepspeed\.nothing'"):
        importlib.import_module("deepspeed.nothing")


def test_the_section_of_nebula_is_read():
    from deepspeed.nebula.config import DeepSpeedNebulaConfig

    found = vars(DeepSpeedNebulaConfig({"nebula": {"enabled": True, "nebula_load_path": "/old"}}))
    assert found == {
        "enabled": True,
        "persistent_storage_path": None,
        "persistent_time_interval": 100,
        "num_of_version_in_retention": 2,
        "enable_nebula_load": True,
        "load_path": "/old",
    }
    assert not DeepSpeedNebulaConfig({}).enabled


@ranks(1, init=False)
def test_a_module_with_names_of_others_keeps_its_source_and_its_own_errors():
    import deepspeed.moe.layer as m
    import deepspeed.runtime.engine as e
    from deepspeed.runtime.engine import MoE, autocast_if_enabled

    assert "class DeepSpeedEngine" in inspect.getsource(e)
    assert inspect.getsource(e.DeepSpeedEngine)
    assert MoE is m.MoE
    assert callable(autocast_if_enabled)
    with pytest.raises(AttributeError, match=r"^module 'deepspeed.runtime.engine' has no attribute 'nothing'$"):
        _ = e.nothing
