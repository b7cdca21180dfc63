"""compression_training, eigenvalue, quantize_training, weight_quantization."""

import pytest
from pydantic import ValidationError

from deepspeed.config.compression import CompressionConfig, EigenvalueConfig, QuantizeTrainingConfig
from deepspeed.config.inference import WeightQuantConfig

TECHNIQUES = [name for name in CompressionConfig.model_fields if name != "layer_reduction"]


def refused(model, **values):
    with pytest.raises(ValidationError) as caught:
        model(**values)
    return str(caught.value)


def technique(shared, params=None, **group):
    groups = {} if params is None else {"g": {"params": params, **group}}
    return {"shared_parameters": shared, "different_groups": groups}


def test_defaults_where_documentation_and_code_differ():
    compression = CompressionConfig()
    assert compression.activation_quantization.shared_parameters.range_calibration == "dynamic"
    offsets = {name: getattr(compression, name).shared_parameters.schedule_offset for name in TECHNIQUES}
    assert offsets == {name: 0 if name == "weight_quantization" else 1000 for name in TECHNIQUES}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_disabled_technique_needs_nothing_and_an_enabled_one_needs_groups(name):
    CompressionConfig(**{name: {"shared_parameters": {"enabled": False}}})
    shared = {"enabled": True, **({"num_heads": 4} if name == "head_pruning" else {})}
    assert "different_groups must name at least one group" in refused(CompressionConfig, **{name: technique(shared)})
    assert "different_groups.g.params." in refused(CompressionConfig, **{name: technique(shared, {})})


def test_a_complete_config():
    ratio = {"dense_ratio": 0.5}
    on = {"enabled": True}
    config = CompressionConfig(
        weight_quantization=technique(on, {"start_bits": 8, "target_bits": 4}, modules=["attention"]),
        activation_quantization=technique(on, {"bits": 8}),
        sparse_pruning=technique({**on, "method": "snip_momentum", "schedule_offset_end": 2000}, ratio),
        row_pruning=technique(on, ratio, related_modules=[["output"]]),
        head_pruning=technique({**on, "num_heads": 12}, ratio),
        channel_pruning=technique(on, ratio),
        layer_reduction={"enabled": True, "module_name_prefix": "bert.layer", "teacher_layer": [1, 3]},
    )
    assert config.weight_quantization.different_groups["g"].params.quantization_period == 1
    assert config.weight_quantization.different_groups["g"].modules == ["attention"]
    assert config.activation_quantization.different_groups["g"].modules == ["*"]


@pytest.mark.parametrize(
    ("name", "block", "said"),
    [
        (
            "weight_quantization",
            technique({"enabled": True, "rounding": "stochastic"}, {"start_bits": 8, "target_bits": 2}),
            "target_bits 2 needs quantization_type symmetric and rounding nearest",
        ),
        ("weight_quantization", technique({"rounding": "up"}), "'nearest' or 'stochastic'"),
        ("weight_quantization", technique({}, {}, modules=["("]), "is not a regular expression"),
        ("sparse_pruning", technique({"dense_ratio": 1.0}), "dense_ratio"),
        (
            "sparse_pruning",
            technique({"enabled": True, "schedule_offset_end": 10}, {"dense_ratio": 0.5}),
            "schedule_offset_end (10) lies before schedule_offset (1000)",
        ),
        ("head_pruning", technique({"enabled": True}, {"dense_ratio": 0.5}), "num_heads must be given"),
        (
            "head_pruning",
            technique({"enabled": True, "num_heads": 4, "method": "l1"}, {"dense_ratio": 0.5}),
            'use "topk"',
        ),
        ("row_pruning", technique({}, {"dense_ratio": 0}), "dense_ratio"),
        ("layer_reduction", {"enabled": True}, "teacher_layer must be given"),
    ],
)
def test_compression_rules(name, block, said):
    assert said in refused(CompressionConfig, **{name: block})


def test_eigenvalue_and_the_first_form():
    assert EigenvalueConfig().model_dump() == {
        "enabled": False,
        "verbose": False,
        "max_iter": 100,
        "tol": 1e-2,
        "stability": 1e-6,
        "gas_boundary_resolution": 1,
        "layer_name": "bert.encoder.layer",
        "layer_num": 0,
    }
    assert QuantizeTrainingConfig(quantize_groups=8).model_extra == {"quantize_groups": 8}


def test_weight_quantization_for_inference():
    block = {"num_bits": 4, "group_size": 64, "group_dim": 1}
    config = WeightQuantConfig(quantized_initialization=block, post_init_quant={"fc": {**block, "num_bits": 8}})
    assert config.quantized_initialization.symmetric is False
    assert config.post_init_quant["fc"].num_bits == 8
    assert WeightQuantConfig(quantized_initialization={}).quantized_initialization is None
    assert "only asymmetric" in refused(WeightQuantConfig, quantized_initialization={**block, "symmetric": True})
    assert "group_dim" in refused(WeightQuantConfig, quantized_initialization={"num_bits": 4, "group_size": 64})
    assert "num_bits" in refused(WeightQuantConfig, post_init_quant={"fc": {**block, "num_bits": 3}})
