"""pipeline, tensor_parallel, expert_parallel."""

import pytest
from pydantic import ValidationError

from deepspeed.config.parallel import (
    ExpertParallelConfig,
    LayerSpecConfig,
    PartitionConfig,
    PipelineConfig,
    TPTrainingConfig,
)


def refused(model, **values):
    with pytest.raises(ValidationError) as caught:
        model(**values)
    return str(caught.value)


def test_pipeline():
    pipeline = PipelineConfig()
    assert (pipeline.stages, pipeline.partition, pipeline.use_reentrant) == ("auto", "best", None)
    assert pipeline.pipe_partitioned is pipeline.grad_partitioned is True
    assert PipelineConfig(stages="4").stages == 4
    assert 'above zero or "auto"' in refused(PipelineConfig, stages="many")
    assert "pipe_partitioned" in refused(PipelineConfig, pipe_partitioned="some")


def test_tensor_parallel_aliases():
    parallel = TPTrainingConfig(autotp_size=4, tp={"tp_size": 4}, kernel_inject=True)
    assert parallel.tensor_parallel.tp_size == 4
    assert parallel.replace_with_kernel_inject
    assert TPTrainingConfig(tensor_parallel={"tp_grain_size": 64}).tensor_parallel.tp_grain_size == 64
    assert TPTrainingConfig().tensor_parallel.tp_grain_size == 1


def test_tensor_parallel_rules():
    assert "tp.tp_size (2) must be 1 or equal autotp_size (4)" in refused(
        TPTrainingConfig, autotp_size=4, tp={"tp_size": 2}
    )
    assert TPTrainingConfig(preset_model="LLaMA").preset_model == "llama"
    assert "'bloom'" in refused(TPTrainingConfig, preset_model="lama")


def test_the_dtype_can_be_written_in_json():
    assert TPTrainingConfig().dtype == "fp16"
    assert TPTrainingConfig(dtype="torch.bfloat16").dtype == "bf16"


def test_partition_rules_keep_their_order():
    config = PartitionConfig(
        layer_specs=[
            {"patterns": [r".*o_proj\.weight"], "partition_type": "row"},
            {"patterns": r".*qkv\.weight", "shape": [[8, 4, 4], -1], "partition_dim": 0, "model_types": ["LLaMA"]},
        ]
    )
    assert [spec.partition_type for spec in config.layer_specs] == ["row", "column"]
    assert config.layer_specs[1].patterns == [r".*qkv\.weight"]
    assert config.layer_specs[1].model_types == ["llama"]
    assert config.lm_head_patterns == ["lm_head", "embed_out"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"patterns": ["("]}, "is not a regular expression"),
        ({"partition_type": "diagonal"}, "'column', 'row' or 'skip'"),
        ({"shape": []}, "expected a list of sizes"),
        ({"shape": [3, 0]}, "expected a list of sizes"),
        ({"shape": [3, True]}, "expected a list of sizes"),
        ({"shape": [[1, -1], 2]}, "expected a list of sizes"),
        ({"shape": [[1], [2]]}, "expected a list of sizes"),
        ({"shape": [[[1]], 2]}, "expected a list of sizes"),
        ({"shape": "3,-1"}, "expected a list of sizes"),
        ({"shape": [3, -1], "partition_dim": 2}, "partition_dim 2 does not index shape"),
        ({"partition_dim": 1}, "partition_dim is 1, but a column layer without shape is split along dim 0"),
        ({"partition_dim": 0, "partition_type": "row"}, "partition_dim is 0, but a row layer without shape"),
        ({"partition_dim": 0, "partition_type": "skip"}, "a skip layer without shape is not split. Give the shape"),
        ({"shape": [3], "partition_type": "row"}, "partition_dim 1 does not index shape"),
        ({"shape": [3, [1, 2]]}, "they must be at partition_dim 0"),
    ],
)
def test_layer_spec_rules(values, said):
    assert said in refused(LayerSpecConfig, **values)


def test_experts_are_checked_when_enabled():
    wrong = {
        "load_balance_coeff": 0.1,
        "gate_up_impl": "fused",
        "use_grouped_mm": False,
    }
    ExpertParallelConfig(**wrong)
    text = refused(ExpertParallelConfig, enabled=True, **wrong)
    for key in ("load_balance_coeff is not supported", "needs use_grouped_mm"):
        assert key in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_expert_groups": 8}, "belong together"),
        ({"num_expert_groups": 2, "num_limited_groups": 4}, "exceeds num_expert_groups (2)"),
        ({"row_weighting_impl": "fused"}, 'needs comm_backend "deepep" and autoep_size above 1'),
        ({"combine_impl": "fused_weighted_sum", "score_apply": "pre"}, 'needs score_apply "post"'),
    ],
)
def test_expert_rules(values, said):
    assert said in refused(ExpertParallelConfig, enabled=True, **values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"autoep_size": 0}, "autoep_size"),
        ({"router_pattern": "moe.gate"}, "without dots, found 'moe.gate'"),
        ({"moe_layer_pattern": "["}, "is not a regular expression"),
        ({"preset_model": "mixtrl"}, "'mixtral'"),
        ({"moe_layer_pattern": "a{99999999999}"}, "is not a regular expression"),
        ({"top_k": 0}, "above zero"),
        ({"top_k": 10**400}, "above zero"),
        ({"routed_scaling_factor": "large"}, 'a number or "auto"'),
        ({"comm_num_sm": 0}, "comm_num_sm"),
    ],
)
def test_expert_values(values, said):
    assert said in refused(ExpertParallelConfig, **values)


def test_a_null_third_weight_differs_from_an_absent_one():
    assert "expert_w3" in ExpertParallelConfig(expert_w3=None).model_fields_set
    assert "expert_w3" not in ExpertParallelConfig().model_fields_set


def test_expert_auto_values():
    experts = ExpertParallelConfig(top_k="2", routed_scaling_factor="2.5")
    assert (experts.top_k, experts.routed_scaling_factor, experts.score_func) == (2, 2.5, "auto")
