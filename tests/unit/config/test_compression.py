"""The sections of compression: what is missing or contradicts itself is one line each, without a model."""

from __future__ import annotations

import pytest

from deepspeed.compression.plan import techniques_of
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import DeepSpeedConfigError

BASE = {"train_batch_size": 4}


def of(name, params=None, groups=True, related=None, **shared):
    group = {"params": params or {}, "modules": ["a"], "related_modules": related}
    different = {"different_groups": {"g": group}} if groups else {}
    return {"compression_training": {name: {"shared_parameters": {"enabled": True, **shared}, **different}}}


BITS = {"start_bits": 8, "target_bits": 2}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (of("row_pruning", groups=False), "row_pruning.different_groups is missing"),
        (of("row_pruning"), "row_pruning.different_groups.g.params.dense_ratio is missing"),
        (of("row_pruning", {"dense_ratio": 0}), "dense_ratio: .*greater than 0, found 0"),
        (of("row_pruning", {"dense_ratio": 1.5}), "dense_ratio: .*less than or equal to 1, found 1.5"),
        (of("row_pruning", {"dense_ratio": 0.5}, related=[["a"], ["b"]]), "related_modules has 2 lists, and modules 1"),
        (of("head_pruning", {"dense_ratio": 0.5}), "head_pruning.shared_parameters.num_heads is missing"),
        (of("weight_quantization", {"start_bits": 4, "target_bits": 8}), r"target_bits \(8\) exceeds start_bits \(4\)"),
        (of("weight_quantization", BITS, rounding="stochastic"), "1 and 2 bits need quantization_type symmetric"),
        (of("weight_quantization", {"start_bits": 8, "target_bits": 7}, store_integers=True), "needs 8, 4, 2 or 1"),
        (of("sparse_pruning", {"dense_ratio": 0.5}, method="l2"), "method: .*'l1'"),
        (of("sparse_pruning", groups=False), "sparse_pruning.different_groups is missing"),
        (of("sparse_pruning", method="snip_momentum", block_pattern="4by1"), "such as 4x1, found '4by1'"),
        (of("sparse_pruning", method="snip_momentum", dense_ratio=0), "dense_ratio: .*greater than 0, found 0"),
        (of("sparse_pruning", method="snip_momentum", schedule_offset=0), "schedule_offset is 0, where snip_momentum"),
        (
            of("sparse_pruning", method="snip_momentum", schedule_offset=9, schedule_offset_end=8),
            r"schedule_offset_end \(8\) is before schedule_offset \(9\)",
        ),
        (
            {
                "compression_training": {
                    "layer_reduction": {"enabled": True, "keep_number_layer": 3, "teacher_layer": [1]}
                }
            },
            "keep_number_layer is 3, and teacher_layer lists 1",
        ),
        ({"quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 4}}}, "quantize_bits.target_bits"),
        (
            {"quantize_training": {"enabled": True}, **of("weight_quantization", {"start_bits": 8, "target_bits": 8})},
            "both say how weights are rounded; keep one",
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_its_key(section, said):
    with pytest.raises(DeepSpeedConfigError, match=said):
        DeepSpeedConfig({**BASE, **section}, world_size=1)


def test_techniques_that_are_off_are_not_checked():
    section = {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": False}}, "head_pruning": None}}
    found = DeepSpeedConfig({**BASE, **section}, world_size=1)
    assert not techniques_of(found.schema.compression_training)
    assert found.notes == []


def test_eigenvalues_belong_to_moq():
    section = {"enabled": True, "stability": 0, "layer_name": "layers"}
    alone = DeepSpeedConfig({**BASE, "eigenvalue": section}, world_size=1)
    assert "eigenvalue.layer_name: no effect: quantize_training.enabled is false" in str(alone.notes[0])
    for given in (
        {"quantize_training": {"enabled": True}, "eigenvalue": section},
        {"quantize_training": {"enabled": True, "eigenvalue": section}},
    ):
        found = DeepSpeedConfig({**BASE, **given}, world_size=1)
        assert found.notes == []
        assert (found.schema.eigenvalue.stability, found.schema.eigenvalue.layer_name) == (0, "layers")
    with pytest.raises(DeepSpeedConfigError, match=r"eigenvalue\.stability: .*greater than or equal to 0, found -1"):
        DeepSpeedConfig({**BASE, "eigenvalue": {"stability": -1}}, world_size=1)


def test_keys_of_blocks_are_of_one_method():
    found = DeepSpeedConfig({**BASE, **of("sparse_pruning", {"dense_ratio": 0.5}, block_pattern="2x1")}, world_size=1)
    assert ["block_pattern: no effect: " in str(note) for note in found.notes] == [True]
    alone = of("sparse_pruning", groups=False, method="snip_momentum", block_pattern="2x1", dense_ratio=0.4)
    assert DeepSpeedConfig({**BASE, **alone}, world_size=1).notes == []
