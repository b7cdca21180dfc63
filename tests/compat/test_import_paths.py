"""Old import paths: every row of the table, and how the finder behaves where people lean on it."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import deepspeed
from deepspeed import _legacy
from deepspeed._legacy_paths import MOVED, SPLIT

ROOT = Path(__file__).resolve().parents[2]
NAMES = [(old, name) for old, names in SPLIT.items() for name in names]

# What scripts and clients import and this version offers, moved or not.
PUBLISHED = {
    "deepspeed.launcher.runner": [
        "DEEPSPEED_ENVIRONMENT_NAME",
        "encode_world_info",
        "fetch_hostfile",
        "main",
        "parse_args",
        "parse_inclusion_exclusion",
        "parse_resource_filter",
    ],
    "deepspeed.monitor.comet": ["CometMonitor"],
    "deepspeed.monitor.csv_monitor": ["csvMonitor"],
    "deepspeed.monitor.monitor": ["Monitor", "MonitorMaster"],
    "deepspeed.monitor.tensorboard": ["TensorBoardMonitor"],
    "deepspeed.monitor.wandb": ["WandbMonitor"],
    "deepspeed.ops.adagrad": ["DeepSpeedCPUAdagrad"],
    "deepspeed.ops.adam": ["DeepSpeedCPUAdam", "FusedAdam"],
    "deepspeed.ops.adam.cpu_adam": ["DeepSpeedCPUAdam"],
    "deepspeed.ops.adam.fused_adam": ["FusedAdam"],
    "deepspeed.ops.lamb": ["FusedLamb"],
    "deepspeed.ops.lion": ["DeepSpeedCPULion", "FusedLion"],
    "deepspeed.runtime.activation_checkpointing": ["checkpointing"],
    "deepspeed.runtime.activation_checkpointing.checkpointing": [
        "checkpoint",
        "configure",
        "get_cuda_rng_tracker",
        "non_reentrant_checkpoint",
    ],
    "deepspeed.checkpoint.utils": ["clone_tensors_for_torch_save"],
    "deepspeed.runtime.base_optimizer": ["DeepSpeedOptimizer", "ZeROOptimizer"],
    "deepspeed.runtime.bf16_optimizer": ["BF16_Optimizer"],
    "deepspeed.runtime.fp16.fused_optimizer": ["FP16_Optimizer"],
    "deepspeed.runtime.fp16.unfused_optimizer": ["FP16_UnfusedOptimizer"],
    "deepspeed.runtime.zero": ["GatheredParameters", "ZeroParamStatus", "unwrap_model_for_generation"],
    "deepspeed.runtime.zero.linear": ["LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap"],
    "deepspeed.runtime.zero.parameter_offload": ["DeepSpeedZeRoOffload", "ZeROOrderedDict"],
    "deepspeed.runtime.zero.partition_parameters": [
        "DeepSpeedTensorOverride",
        "GatheredParameters",
        "Init",
        "ZeroParamStatus",
        "partitioned_param_data_shape",
        "register_external_parameter",
        "zero3_linear_wrap",
    ],
    "deepspeed.runtime.zero.stage3": [
        "DeepSpeedZeroOptimizer_Stage3",
        "estimate_zero3_model_states_mem_needs_all_live",
        "unwrap_model_for_generation",
    ],
    "deepspeed.runtime.zero.stage_1_and_2": [
        "DeepSpeedZeroOptimizer",
        "estimate_zero2_model_states_mem_needs_all_cold",
    ],
    "deepspeed.runtime.zero.tiling": ["TiledLinear", "TiledLinearReturnBias"],
    "deepspeed.runtime.zero.utils": ["ZeRORuntimeException"],
    "deepspeed.utils.tensor_fragment": ["fragment_address", "safe_get_full_grad", "tensor_fragment"],
    "deepspeed.utils.zero_to_fp32": ["get_fp32_state_dict_from_zero_checkpoint", "get_optim_files"],
    "deepspeed.runtime.comm.coalesced_collectives": ["reduce_scatter_coalesced"],
    "deepspeed.runtime.dataloader": ["DeepSpeedDataLoader", "RepeatingLoader"],
    "deepspeed.runtime.engine": ["DeepSpeedEngine"],
    "deepspeed.runtime.fp16.loss_scaler": ["CreateLossScaler", "DynamicLossScaler", "LossScaler", "LossScalerBase"],
    "deepspeed.runtime.lr_schedules": [
        "COS_MIN_RATIO",
        "CYCLE_FIRST_STEP_SIZE",
        "CYCLE_MAX_LR",
        "CYCLE_MAX_MOM",
        "CYCLE_MIN_LR",
        "CYCLE_MIN_MOM",
        "DECAY_LR_RATE",
        "DECAY_MOM_RATE",
        "DECAY_STEP_SIZE",
        "LRRangeTest",
        "LR_RANGE_TEST",
        "LR_RANGE_TEST_MIN_LR",
        "LR_RANGE_TEST_STAIRCASE",
        "LR_RANGE_TEST_STEP_RATE",
        "LR_RANGE_TEST_STEP_SIZE",
        "ONE_CYCLE",
        "OneCycle",
        "TOTAL_NUM_STEPS",
        "VALID_LR_SCHEDULES",
        "WARMUP_COSINE_LR",
        "WARMUP_DECAY_LR",
        "WARMUP_LINEAR_RATE",
        "WARMUP_LOG_RATE",
        "WARMUP_LR",
        "WARMUP_MAX_LR",
        "WARMUP_MIN_LR",
        "WARMUP_MIN_RATIO",
        "WARMUP_NUM_STEPS",
        "WARMUP_TYPE",
        "WarmupCosineLR",
        "WarmupDecayLR",
        "WarmupLR",
    ],
    "deepspeed.runtime.utils": ["see_memory_usage"],
    "deepspeed.runtime.zero.muon": ["MuonWithAuxAdam"],
    "deepspeed.runtime.zero.muon.muon_optimizer": ["MuonWithAuxAdam"],
    "deepspeed.runtime.zero.muon.original_muon": ["muon_update"],
    "deepspeed.utils.timer": ["SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean"],
    "deepspeed": ["comm", "get_accelerator"],
    "deepspeed.accelerator": ["get_accelerator", "is_current_accelerator_supported", "set_accelerator"],
    "deepspeed.accelerator.abstract_accelerator": ["DeepSpeedAccelerator"],
    "deepspeed.accelerator.cpu_accelerator": ["CPU_Accelerator"],
    "deepspeed.accelerator.cuda_accelerator": ["CUDA_Accelerator"],
    "deepspeed.accelerator.real_accelerator": ["get_accelerator", "set_accelerator"],
    "deepspeed.comm": ["init_distributed", "is_initialized", "get_rank"],
    "deepspeed.comm.comm": ["init_distributed", "all_reduce"],
    "deepspeed.compile.config": ["CompileConfig"],
    "deepspeed.git_version_info": ["torch_info", "version"],
    "deepspeed.monitor.config": ["DeepSpeedMonitorConfig", "get_monitor_config"],
    "deepspeed.runtime": ["config"],
    "deepspeed.runtime.config": ["ADAM_OPTIMIZER", "DeepSpeedConfig", "get_gradient_clipping", "get_log_level"],
    "deepspeed.runtime.config_utils": ["DeepSpeedConfigModel"],
    "deepspeed.runtime.constants": ["GRADIENT_CLIPPING_DEFAULT", "LOG_LEVEL_DEFAULT"],
    "deepspeed.runtime.pipe.topology": [
        "PipeDataParallelTopology",
        "PipeModelDataParallelTopology",
        "PipelineParallelGrid",
        "ProcessTopology",
    ],
    "deepspeed.runtime.precision_config": ["DeepSpeedFP16Config", "get_bfloat16_config"],
    "deepspeed.runtime.tensor_parallel.config": ["TPConfig", "TPTrainingConfig", "get_tensor_parallel_config"],
    "deepspeed.runtime.zenflow.zenflow_config": ["ZenFlowConfig"],
    "deepspeed.runtime.zero.config": [
        "DeepSpeedZeroConfig",
        "DeepSpeedZeroOffloadOptimizerConfig",
        "DeepSpeedZeroOffloadParamConfig",
        "ZeroStageEnum",
    ],
    "deepspeed.runtime.zero.leaf_module_config": [
        "DEFAULT_LEAF_MODULE_CLASSES",
        "DEFAULT_LEAF_MODULE_NAMES",
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    ],
    "deepspeed.runtime.zero.offload_config": [
        "DeepSpeedZeroOffloadOptimizerConfig",
        "OffloadDeviceEnum",
        "OffloadStateTypeEnum",
    ],
    "deepspeed.utils": ["groups", "logging", "logger", "log_dist", "set_log_level_from_string"],
    "deepspeed.utils.comms_logging": ["CommsLogger"],
    "deepspeed.utils.groups": ["_get_expert_parallel_ranks"],
    "deepspeed.utils.logging": ["logger", "log_dist"],
    "deepspeed.utils.numa": ["parse_range_list"],
    "deepspeed.utils.nvtx": ["instrument_w_nvtx"],
    "deepspeed.utils.torch": ["required_torch_version"],
    "deepspeed.utils.types": ["ActivationFuncType"],
}


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_module_is_its_home(old):
    module = importlib.import_module(old)
    home = importlib.import_module(MOVED[old])
    assert module is home is sys.modules[old]
    assert home.__name__ == home.__spec__.name == MOVED[old]


@pytest.mark.parametrize(("old", "name"), NAMES)
def test_a_split_name_is_the_one_at_its_home(old, name):
    home, _, new = SPLIT[old][name].partition(":")
    expected = getattr(importlib.import_module(home), new or name)
    assert getattr(importlib.import_module(old), name) is expected


def test_no_row_hides_a_file_or_points_to_an_old_path():
    homes = [*MOVED.values(), *(row.partition(":")[0] for names in SPLIT.values() for row in names.values())]
    assert not {*MOVED} & {*SPLIT}
    assert not {*homes} & {*MOVED, *SPLIT}
    for old in (*MOVED, *SPLIT):
        stem = ROOT.joinpath(*old.split("."))
        assert not stem.with_suffix(".py").exists()
        assert not (stem / "__init__.py").exists()
    for home in homes:
        stem = ROOT.joinpath(*home.split("."))
        assert stem.with_suffix(".py").exists() or (stem / "__init__.py").exists(), home


def test_the_table_is_sorted():
    for names in (MOVED, SPLIT, *SPLIT.values()):
        assert list(names) == sorted(names)


@pytest.mark.parametrize("old", PUBLISHED)
def test_published_names(old):
    module = importlib.import_module(old)
    for name in PUBLISHED[old]:
        getattr(module, name)


def test_every_row_is_published():
    assert {*MOVED, *SPLIT} - {
        "deepspeed.accelerator." + kind + "_accelerator" for kind in ("hpu", "mlu", "mps", "npu", "sdaa", "xpu")
    } <= {*PUBLISHED}


def test_in_a_fresh_process_each_spelling_of_an_import_works():
    code = """
import deepspeed
import deepspeed.runtime.config
from deepspeed.runtime import precision_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.config import *
import deepspeed.runtime.pipe.topology as topology
print(deepspeed.runtime.config.DeepSpeedConfig is deepspeed.DeepSpeedConfig)
print(precision_config.DeepSpeedFP16Config.__module__, ZeroStageEnum.__module__, topology.__name__)
print(deepspeed.runtime.zero.offload_config.OffloadDeviceEnum.__module__)
print(DeepSpeedZeroOffloadParamConfig.__name__)
"""
    assert fresh(code).splitlines() == [
        "True",
        "deepspeed.config.precision deepspeed.config.zero deepspeed.parallel.topology",
        "deepspeed.config.offload",
        "DeepSpeedZeroOffloadParamConfig",
    ]


def test_made_up_packages_hold_only_old_paths():
    package = importlib.import_module("deepspeed.runtime.zenflow")
    assert package.__path__ == []
    assert package.zenflow_config is importlib.import_module("deepspeed.config.zenflow")
    assert package.__all__ == []


def test_a_real_package_is_not_replaced():
    assert importlib.import_module("deepspeed.utils").__file__.endswith("__init__.py")
    assert importlib.import_module("deepspeed.accelerator").__file__.endswith("__init__.py")


def test_patching_through_a_moved_path():
    home = importlib.import_module("deepspeed.parallel.topology")
    original = home.ProcessTopology
    with mock.patch("deepspeed.runtime.pipe.topology.ProcessTopology") as fake:
        assert home.ProcessTopology is fake
    assert home.ProcessTopology is original


def test_patching_through_a_split_path():
    home = importlib.import_module("deepspeed.config.zero")
    original = home.DeepSpeedZeroConfig
    with mock.patch("deepspeed.runtime.zero.config.DeepSpeedZeroConfig") as fake:
        assert home.DeepSpeedZeroConfig is fake
    assert home.DeepSpeedZeroConfig is original
    assert importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig is original


@pytest.mark.parametrize(
    ("old", "name", "home"),
    [
        ("deepspeed.runtime.pipe.topology", "ProcessTopology", "deepspeed.parallel.topology"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum", "deepspeed.config.zero"),
    ],
)
def test_unpickling_by_an_old_path(old, name, home):
    text = f"c{old}\n{name}\n.".encode()  # protocol 0: "the object called `name` in module `old`"
    assert pickle.loads(text) is getattr(importlib.import_module(home), name)


def test_a_missing_name_is_an_ordinary_error_that_names_the_old_path():
    module = importlib.import_module("deepspeed.runtime.config")
    with pytest.raises(AttributeError, match=r"module 'deepspeed\.runtime\.config' has no attribute 'nope'"):
        module.nope  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'nope' from 'deepspeed\.runtime\.config'"):
        exec("from deepspeed.runtime.config import nope")
    assert not hasattr(module, "__path__")


@pytest.mark.parametrize("path", ["deepspeed.runtime.nope", "deepspeed.nope", "deepspeed.runtime.pipe.topology.nope"])
def test_a_missing_module_is_an_ordinary_error_that_names_it(path):
    with pytest.raises(ModuleNotFoundError, match=path.replace(".", r"\.")) as caught:
        importlib.import_module(path)
    assert caught.value.name == path
    assert path not in sys.modules


def test_dir_lists_the_old_names():
    assert {*SPLIT["deepspeed.runtime.config"]} <= {*dir(importlib.import_module("deepspeed.runtime.config"))}
    assert importlib.import_module("deepspeed.runtime.config").__all__ == sorted(SPLIT["deepspeed.runtime.config"])


def test_setting_another_attribute_stays_on_the_old_module():
    module = importlib.import_module("deepspeed.runtime.config")
    module.note = 1
    assert module.note == 1
    del module.note
    assert not hasattr(module, "note")


def test_modules_below_a_moved_package_are_not_loaded_twice(monkeypatch):
    monkeypatch.setitem(MOVED, "deepspeed.old_parallel", "deepspeed.parallel")
    try:
        assert importlib.import_module("deepspeed.old_parallel.topology") is importlib.import_module(
            "deepspeed.parallel.topology"
        )
        with pytest.raises(ModuleNotFoundError, match=r"deepspeed\.old_parallel\.nope"):
            importlib.import_module("deepspeed.old_parallel.nope")
    finally:
        for name in ("deepspeed.old_parallel", "deepspeed.old_parallel.topology"):
            sys.modules.pop(name, None)
        vars(deepspeed).pop("old_parallel", None)


def test_installing_twice_keeps_one_finder():
    _legacy.install()
    _legacy.install()
    assert [type(finder).__module__ for finder in sys.meta_path].count("deepspeed._legacy") == 1


def test_the_finder_leaves_other_packages_alone():
    assert importlib.util.find_spec("accelerator") is None or "deepspeed" not in str(
        importlib.util.find_spec("accelerator").origin
    )
    assert importlib.util.find_spec("json").origin.endswith("__init__.py")


def test_the_config_readers_answer_from_the_schema():
    config = importlib.import_module("deepspeed.runtime.config")
    constants = importlib.import_module("deepspeed.runtime.constants")
    assert config.get_gradient_clipping({}) == constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert config.get_gradient_clipping({"gradient_clipping": 0.5}) == 0.5
    assert config.get_log_level({}) is constants.LOG_LEVEL_DEFAULT is None
    assert config.get_log_level({"log_level": "debug"}) == "debug"
    assert config.ADAM_OPTIMIZER == "adam"
    with pytest.raises(config.DeepSpeedConfigError):
        config.get_gradient_clipping({"gradient_cliping": 0.5})
    precision = importlib.import_module("deepspeed.runtime.precision_config")
    assert precision.get_bfloat16_config({"bf16": {"enabled": True}}).enabled
    monitor = importlib.import_module("deepspeed.monitor.config")
    assert monitor.get_monitor_config({"csv_monitor": {"enabled": True, "output_path": "x"}}).csv_monitor.enabled
    parallel = importlib.import_module("deepspeed.runtime.tensor_parallel.config")
    assert parallel.get_tensor_parallel_config({"tensor_parallel": {"autotp_size": 2}}).autotp_size == 2
