"""zero_optimization with its offload, zenflow and leaf_module blocks."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from deepspeed.config.renamed import RENAMED
from deepspeed.config.schema import Schema
from deepspeed.config.zero import (
    DEFAULT_LEAF_MODULE_CLASSES,
    DeepSpeedZeroConfig,
    DeepSpeedZeroLeafModuleConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    ZenFlowConfig,
    ZeroStageEnum,
)

CPU = {"device": "cpu"}


def refused(model, **values):
    with pytest.raises(ValidationError) as caught:
        model(**values)
    return str(caught.value)


@pytest.mark.parametrize("value", [2, "2", 2.0, ZeroStageEnum.gradients])
def test_a_stage_in_any_form(value):
    assert DeepSpeedZeroConfig(stage=value).stage is ZeroStageEnum.gradients


@pytest.mark.parametrize("value", [4, -1, 1.5, "two", None, [1], float("inf"), float("nan")])
def test_other_stages_are_refused_with_the_choices(value):
    assert "expected ZeRO stage 0, 1, 2 or 3, found" in refused(DeepSpeedZeroConfig, stage=value)


def test_stage_names():
    assert ZeroStageEnum.max_stage is ZeroStageEnum.weights == 3
    assert [stage.name for stage in ZeroStageEnum] == ["disabled", "optimizer_states", "gradients", "weights"]


def test_defaults_where_documentation_and_code_differ():
    zero = DeepSpeedZeroConfig()
    assert zero.prefetch_bucket_size == 50_000_000
    assert zero.sub_group_size == 1_000_000_000
    assert zero.model_persistence_threshold == 2**63 - 1
    assert zero.offload_param is None
    assert zero.offload_optimizer is None


@pytest.mark.parametrize(
    ("given", "stage", "on"), [(None, 2, True), (None, 3, True), (False, 3, False), (True, 1, True)]
)
def test_gradients_travel_during_backward_unless_that_is_off(given, stage, on):
    zero = DeepSpeedZeroConfig(stage=stage, overlap_comm=given)
    assert zero.overlap_comm is given
    assert zero.overlaps_comm is on


ALIASED = [name for name, field in DeepSpeedZeroConfig.model_fields.items() if field.alias]


def test_which_keys_have_a_stage3_spelling():
    assert len(ALIASED) == 9
    assert all(DeepSpeedZeroConfig.model_fields[name].alias == f"stage3_{name}" for name in ALIASED)


@pytest.mark.parametrize("name", ALIASED)
def test_both_spellings_work_at_any_stage_but_not_together(name):
    assert getattr(DeepSpeedZeroConfig(**{name: 1}), name) == 1
    assert getattr(DeepSpeedZeroConfig(stage=2, **{f"stage3_{name}": 1}), name) == 1
    assert "they are one key" in refused(DeepSpeedZeroConfig, **{name: 1, f"stage3_{name}": 1})


def test_sizes_may_be_floats_with_or_without_a_fraction():
    zero = DeepSpeedZeroConfig(reduce_bucket_size=5e8, stage3_prefetch_bucket_size=0.9 * 33 * 33, sub_group_size=1e12)
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.sub_group_size) == (500_000_000, 980, 10**12)
    assert "reduce_bucket_size" in refused(DeepSpeedZeroConfig, reduce_bucket_size=0)
    assert "sub_group_size" in refused(DeepSpeedZeroConfig, sub_group_size=-1)


def test_keys_without_effect_are_accepted():
    assert DeepSpeedZeroConfig(allgather_partitions=False).allgather_partitions is False
    assert "no longer exists" in refused(DeepSpeedZeroConfig, legacy_stage1=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_norm_can_be_left_out_at_stages_1_and_2_only(stage):
    assert f"found stage {stage}" in refused(DeepSpeedZeroConfig, stage=stage, compute_grad_norm=False)
    assert not DeepSpeedZeroConfig(stage=1, compute_grad_norm=False).compute_grad_norm


def test_what_needs_the_norm():
    values = {"stage": 2, "compute_grad_norm": False, "offload_optimizer": CPU, "zenflow": {}}
    text = refused(DeepSpeedZeroConfig, **values)
    assert "must be true with zenflow" in text
    assert "must be true with offload_optimizer" in text
    DeepSpeedZeroConfig(stage=2, compute_grad_norm=False, offload_optimizer={"device": "none"})


def test_mics_and_loco():
    assert DeepSpeedZeroConfig(mics_shard_size=4).mics_shard_size == 4
    for value in (0, -2):
        assert "-1 for off" in refused(DeepSpeedZeroConfig, mics_shard_size=value)
    assert "reset_T" in refused(DeepSpeedZeroConfig, zeropp_loco_param={"err_beta": 0.8})
    assert DeepSpeedZeroConfig(zeropp_loco_param={"err_beta": 0.8, "reset_T": 1024}).zeropp_loco_param.reset_T == 1024


def test_offload_defaults():
    parameters, optimizer = DeepSpeedZeroOffloadParamConfig(), DeepSpeedZeroOffloadOptimizerConfig()
    assert parameters.device is optimizer.device is OffloadDeviceEnum.none
    assert (parameters.buffer_count, optimizer.buffer_count) == (5, 4)
    assert (parameters.buffer_size, parameters.max_in_cpu) == (10**8, 10**9)
    assert parameters.pin_memory is optimizer.pin_memory is True
    assert (optimizer.ratio, optimizer.cpuadam_cores_perc) == (1.0, 0.8)


def test_what_accelerate_and_lightning_write():
    none = {"device": "none", "nvme_path": None}
    zero = DeepSpeedZeroConfig(stage=2, offload_optimizer=none, offload_param=none, overlap_comm=None)
    assert not zero.offloads_optimizer
    assert not zero.offloads_parameters
    block = {**none, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9, "pin_memory": False}
    assert DeepSpeedZeroConfig(stage=2, offload_param=block).offload_param.max_in_cpu == 10**9


def test_offload_devices():
    assert "'none', 'cpu' or 'nvme'" in refused(DeepSpeedZeroOffloadParamConfig, device="CPU")
    for model in (DeepSpeedZeroOffloadParamConfig, DeepSpeedZeroOffloadOptimizerConfig):
        for path in (None, "", "  "):
            assert "nvme_path is not given" in refused(model, device="nvme", nvme_path=path)
        assert model(device="nvme", nvme_path="/disk").nvme_path == Path("/disk")
    assert DeepSpeedZeroConfig(offload_optimizer=CPU).offloads_optimizer
    assert DeepSpeedZeroConfig(stage=3, offload_param=CPU).offloads_parameters
    disk = {"device": "nvme", "nvme_path": "/disk"}
    assert DeepSpeedZeroConfig(stage=3, offload_optimizer=disk, offload_param=disk).swap_folders == [Path("/disk")] * 2
    below = DeepSpeedZeroConfig(stage=2, offload_param=disk)  # published configs have it there
    assert not below.offloads_parameters
    assert below.swap_folders == []


def test_the_derived_pipeline_flag():
    assert not DeepSpeedZeroOffloadOptimizerConfig().pipeline
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline


def test_a_partial_offload_needs_stage_3():
    part = {"device": "cpu", "ratio": 0.5}
    assert "needs stage 3, found stage 2" in refused(DeepSpeedZeroConfig, stage=2, offload_optimizer=part)
    assert DeepSpeedZeroConfig(stage=3, offload_optimizer=part).offload_optimizer.ratio == 0.5
    assert "ratio" in refused(DeepSpeedZeroOffloadOptimizerConfig, ratio=1.1)


def test_state_types():
    assert [kind.value for kind in OffloadStateTypeEnum] == [
        "optim_states",
        "hp_params",
        "lp_params",
        "lp_grads",
        "contiguous_grad_buffer",
    ]


def test_leaf_modules():
    leaf = DeepSpeedZeroLeafModuleConfig()
    assert leaf.classes == DEFAULT_LEAF_MODULE_CLASSES
    assert [name.rsplit(".", 1)[1][:5] for name in leaf.classes] == ["Mixtr", "Qwen2", "Qwen3"]
    assert DeepSpeedZeroLeafModuleConfig(classes="a.B").classes == ["a.B"]
    assert DeepSpeedZeroLeafModuleConfig(names=["x", "y", "x"]).names == ["x", "y"]
    leaf.classes.append("mine")
    assert "mine" not in DeepSpeedZeroLeafModuleConfig().classes
    assert "mine" not in DEFAULT_LEAF_MODULE_CLASSES


def test_zenflow_defaults_own_auto():
    flow = ZenFlowConfig()
    assert (flow.select_strategy, flow.select_interval, flow.update_interval) == ("auto",) * 3
    assert (flow.topk_ratio, flow.auto_ratio, flow.pt_reserved_cores_perc) == (0.1, 0.99, 0.5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"topk_ratio": 0}, "topk_ratio"),
        ({"topk_ratio": 1}, "topk_ratio"),
        ({"select_strategy": "week"}, "select_strategy"),
        ({"select_interval": 3}, 'while select_strategy is "auto"'),
        ({"select_strategy": "step"}, 'must be a number with select_strategy "step"'),
        ({"update_interval": 0}, 'above zero or "auto", found 0'),
        ({"update_interval": 1.5}, 'above zero or "auto", found 1.5'),
        (
            {"select_strategy": "step", "select_interval": 2, "update_interval": 4},
            "update_interval (4) must not exceed",
        ),
    ],
)
def test_zenflow_rules(values, said):
    assert said in refused(ZenFlowConfig, **values)


def test_zenflow_counts_epochs_apart_from_steps():
    flow = ZenFlowConfig(select_strategy="epoch", select_interval=1, update_interval=4)
    assert flow.update_interval == 4


def test_zenflow_inside_zero():
    assert "needs offload_optimizer.device" in refused(DeepSpeedZeroConfig, stage=2, zenflow={})
    offload = {"stage": 2, "offload_optimizer": CPU}
    assert "zenflow.offload needs overlap_comm" in refused(DeepSpeedZeroConfig, **offload, zenflow={"offload": True})
    DeepSpeedZeroConfig(**offload, overlap_comm=True, zenflow={"offload": True})
    assert DeepSpeedZeroConfig(**offload).zenflow is None


def test_older_names_of_a_section_that_is_built_by_itself():
    section = DeepSpeedZeroConfig(stage=3, cpu_offload=True, cpu_offload_param=True, cpu_offload_use_pin_memory=False)
    assert section.offload_optimizer.device == "cpu"
    assert section.offload_optimizer.pin_memory is False
    assert section.offload_param.device == "cpu"
    assert DeepSpeedZeroConfig(cpu_offload=False).offload_optimizer is None
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    given = {"cpu_offload": True}
    DeepSpeedZeroConfig(**given)
    assert given == {"cpu_offload": True}
    with pytest.raises(ValidationError, match="cpu_offload: it is the old name of"):
        DeepSpeedZeroConfig(cpu_offload=True, offload_optimizer={"device": "cpu"})


def test_every_section_with_older_names_knows_them():
    pairs = [(row.old.split("."), row.new.split(".")) for row in RENAMED]
    sections = {old[0] for old, new in pairs if len(old) > 1 and old[0] == new[0]}
    fields = {name: field.annotation for name, field in Schema.model_fields.items()}
    assert {name: getattr(fields[name], "renamed_under", None) for name in sections} == {n: n for n in sections}
