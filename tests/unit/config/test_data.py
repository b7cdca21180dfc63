"""The sections of data efficiency: what is missing or contradicts itself is one line each, without a model."""

from __future__ import annotations

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import DeepSpeedConfigError

BASE = {"train_batch_size": 4}
METRIC = {
    "index_to_sample_path": "a",
    "index_to_metric_path": "b",
    "difficulty_type": "value",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2},
}
LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_type": "decoder",
    "random_ltd_schedule": {
        "min_value": 8,
        "max_value": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 8},
    },
}


def sampled(**metric):
    section = {"enabled": True, "data_cluster_path": "c", "curriculum_metrics": {"seqlen": {**METRIC, **metric}}}
    return {"data_efficiency": {"data_sampling": {"curriculum_learning": section}}}


def routed(**more):
    return {"data_efficiency": {"data_routing": {"random_ltd": {**LTD, **more}}}}


def batched(**section):
    return {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, **section}}}}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (sampled(index_to_sample_path=None), "seqlen: index_to_sample_path is missing"),
        (sampled(index_to_metric_path=None), "seqlen: index_to_metric_path is missing"),
        (sampled(difficulty_type="percentile", max_difficulty=101), "max_difficulty is 101; a percentile"),
        (sampled(schedule_config={"total_curriculum_step": 0}), "total_curriculum_step: .*greater than 0, found 0"),
        (sampled(schedule_config={}), "seqlen: schedule_config.root_degree is missing"),
        (sampled(min_difficulty=65), r"seqlen: min_difficulty \(65\) exceeds max_difficulty \(64\)"),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            "curriculum_metrics is empty",
        ),
        (batched(), "max_tokens is missing"),
        (batched(max_tokens=8, min_batch_size=3, max_batch_size=2), r"min_batch_size \(3\) exceeds"),
        (batched(max_tokens=8, lr_scaling_method="cubic"), "lr_scaling_method: .*'cubic'"),
        (routed(random_ltd_layer_id=[1, 1]), r"random_ltd_layer_id is \[1, 1\], expected 2 different"),
        (routed(total_layer_num=1), r"random_ltd_layer_num \(2\) exceeds total_layer_num \(1\)"),
        (routed(model_type="encoder", model_mask_name=None), "model_mask_name is empty"),
        (routed(random_ltd_schedule={}), "random_ltd_schedule.schedule_config.seq_per_step is missing"),
        (routed(layer_token_lr_schedule={"enabled": True}), "total_layer_tokens is missing"),
        ({"progressive_layer_drop": {"enabled": True, "theta": 0}}, "theta: .*greater than 0"),
        ({"progressive_layer_drop": {"enabled": True, "theta": 1.5}}, "theta: .*less than or equal to 1"),
    ],
)
def test_one_line_for_each_mistake(section, said):
    with pytest.raises(DeepSpeedConfigError, match=said):
        DeepSpeedConfig({**BASE, **section})


def test_outer_switches_turn_off_what_is_inside():
    on = DeepSpeedConfig({**BASE, **sampled()}).schema.data_efficiency
    assert on.curriculum is not None
    for outer in ({"enabled": False}, {"data_sampling": {"enabled": False}}):
        data = {
            **outer,
            "data_sampling": {**sampled()["data_efficiency"]["data_sampling"], **outer.get("data_sampling", {})},
        }
        off = DeepSpeedConfig({**BASE, "data_efficiency": data})
        assert off.schema.data_efficiency.curriculum is None
        assert "data_efficiency.enabled or data_efficiency.data_sampling.enabled is false" in "".join(off.notes) or (
            data["data_sampling"].get("enabled") is False
        )
    assert DeepSpeedConfig({**BASE, **routed()}).schema.data_efficiency.random_ltd is not None
