"""data_efficiency, the two curricula, random_ltd, progressive_layer_drop."""

import pytest
from pydantic import ValidationError

from deepspeed.config.data import (
    CurriculumLearningConfig,
    DataEfficiencyConfig,
    DynamicBatchingConfig,
    LayerTokenLRConfig,
    LegacyCurriculumConfig,
    ProgressiveLayerDropConfig,
    RandomLTDConfig,
)

LINEAR = {
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
}
LTD = {
    "total_layer_num": 24,
    "random_ltd_layer_num": 22,
    "random_ltd_layer_id": list(range(1, 23)),
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 128,
        "max_value": 512,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 100, "seq_per_step": 16},
    },
}


def refused(model, **values):
    with pytest.raises(ValidationError) as caught:
        model(**values)
    return str(caught.value)


def test_data_efficiency_defaults():
    data = DataEfficiencyConfig()
    assert (data.enabled, data.seed) == (False, 1234)
    assert (data.data_sampling.enabled, data.data_sampling.num_epochs) == (False, 1000)
    assert (data.data_routing.enabled, data.data_routing.random_ltd.enabled) == (False, False)


def test_an_enabled_curriculum_needs_its_keys():
    text = refused(CurriculumLearningConfig, enabled=True)
    assert "data_cluster_path must be given" in text
    assert "at least one metric" in text
    metrics = {"seqlen": {"difficulty_type": "value", "clustering_type": "single_cluster", **LINEAR}}
    CurriculumLearningConfig(enabled=True, data_cluster_path="/tmp/x", curriculum_metrics=metrics)
    CurriculumLearningConfig(enabled=False, curriculum_metrics={"seqlen": {}})


def test_clustering_needs_the_analysis():
    metrics = {"rarity": {"difficulty_type": "value", "clustering_type": "schedule_based", **LINEAR}}
    text = refused(CurriculumLearningConfig, enabled=True, data_cluster_path="x", curriculum_metrics=metrics)
    assert "curriculum_metrics.rarity.index_to_sample_path must be given" in text
    assert "curriculum_metrics.rarity.index_to_metric_path must be given" in text
    metrics["rarity"].update(difficulty_type="percentile", index_to_sample_path="y")
    CurriculumLearningConfig(enabled=True, data_cluster_path="x", curriculum_metrics=metrics)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({**LINEAR, "max_difficulty": None}, "max_difficulty must be given"),
        ({**LINEAR, "schedule_type": None}, "schedule_type must be given"),
        ({**LINEAR, "schedule_type": "fast"}, "schedule_type"),
        ({**LINEAR, "schedule_config": {}}, 'total_curriculum_step must be given with schedule_type "fixed_linear"'),
        ({**LINEAR, "schedule_type": "fixed_root"}, "schedule_config.root_degree must be given"),
        ({**LINEAR, "schedule_type": "fixed_discrete"}, "schedule_config.difficulty must be given"),
        (
            {
                **LINEAR,
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1, 2], "max_step": [5, 10]},
            },
            "found 2 and 2",
        ),
        (
            {**LINEAR, "schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1], "max_step": []}},
            "found 1 and 0",
        ),
    ],
)
def test_schedule_shapes(values, said):
    assert said in refused(LegacyCurriculumConfig, enabled=True, **values)


def test_the_older_curriculum():
    assert LegacyCurriculumConfig(enabled=True, **LINEAR).curriculum_type == "seqlen"
    discrete = {"difficulty": [1, 2, 3], "max_step": [5, 10]}
    LegacyCurriculumConfig(enabled=True, **{**LINEAR, "schedule_type": "fixed_discrete", "schedule_config": discrete})
    LegacyCurriculumConfig(enabled=True, **{**LINEAR, "schedule_type": "custom", "schedule_config": {}})
    LegacyCurriculumConfig(enabled=False)


def test_dynamic_batching():
    assert "max_tokens must be given" in refused(DynamicBatchingConfig, enabled=True)
    assert "min_batch_size (4) exceeds max_batch_size (2)" in refused(
        DynamicBatchingConfig, enabled=True, max_tokens=8, min_batch_size=4, max_batch_size=2
    )
    assert "'linear', 'sqrt' or 'none'" in refused(DynamicBatchingConfig, lr_scaling_method="cube")
    assert DynamicBatchingConfig(enabled=True, max_tokens=4096).sequence_picking_order == "dataloader"


def test_random_ltd_needs_every_key_when_enabled():
    assert RandomLTDConfig(enabled=True, **LTD).model_mask_name is None
    text = refused(RandomLTDConfig, enabled=True)
    for key in (*LTD, "schedule_config.seq_per_step"):
        if key != "random_ltd_schedule":
            assert f"{key} must be given when random_ltd is enabled" in text
    assert "random_ltd_schedule.min_value" in text


def test_random_ltd_values():
    assert "'fixed_linear'" in refused(RandomLTDConfig, random_ltd_schedule={"schedule_type": "fixed_root"})
    assert "'encoder' or 'decoder'" in refused(RandomLTDConfig, model_type="both")
    assert "does not exist" in refused(LayerTokenLRConfig, enabled=True)
    LayerTokenLRConfig(total_layer_tokens=360, warmup_type="linear", warmup_layer_tokens=0.1)


def test_progressive_layer_drop():
    assert "theta must be given" in refused(ProgressiveLayerDropConfig, enabled=True, gamma=0.001)
    assert ProgressiveLayerDropConfig(enabled=True, theta=0.5, gamma=0.001).theta == 0.5
    assert "theta" in refused(ProgressiveLayerDropConfig, theta=1.5)
