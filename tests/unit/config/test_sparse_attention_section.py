"""The section `sparse_attention`: what scripts read of it, and what is refused before there is a model."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from deepspeed._assemble.trial import verdict
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.load import load
from deepspeed.config.schema import Schema
from deepspeed.ops import sparse_attention

KINDS = {
    "dense": "DenseSparsityConfig",
    "fixed": "FixedSparsityConfig",
    "variable": "VariableSparsityConfig",
    "bigbird": "BigBirdSparsityConfig",
    "bslongformer": "BSLongformerSparsityConfig",
}


def section(**given):
    return DeepSpeedConfig({"train_batch_size": 1, "sparse_attention": given}).sparse_attention


@pytest.mark.parametrize("mode", KINDS)
def test_models_build_the_pattern_from_what_they_read(mode):
    """As scripts do: the mode chooses a class, the rest are its arguments."""
    found = section(mode=mode.upper(), block=32)
    assert found.pop("mode") == mode
    pattern = getattr(sparse_attention, KINDS[mode])(num_heads=2, **found)
    assert pattern.make_layout(128).shape == (2, 4, 4)


def test_defaults():
    assert section() == {
        "mode": "fixed",
        "block": 16,
        "different_layout_per_head": False,
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    }
    assert section(mode="variable")["local_window_blocks"] == [4]
    assert section(mode="bigbird")["num_random_blocks"] == 0


@pytest.mark.parametrize("off", [None, False])
def test_off(off):
    assert DeepSpeedConfig({"train_batch_size": 1, "sparse_attention": off}).sparse_attention is None


def test_values_that_cannot_be_are_refused():
    for given in ({"mode": "sparse"}, {"block": 0}, {"attention": "both"}, {"local_window_blocks": []}, {"blocks": 2}):
        with pytest.raises(ValidationError):
            Schema(sparse_attention=given)


def test_what_contradicts_itself_is_said_without_a_model():
    given = {"mode": "fixed", "num_local_blocks": 4, "num_global_blocks": 3}
    problems = verdict(load({"train_batch_size": 1, "sparse_attention": given}), 1).problems
    assert problems == [
        "sparse_attention: num_local_blocks is 4 and num_global_blocks 3; the second must divide the first"
    ]
    assert verdict(load({"train_batch_size": 1, "sparse_attention": {"mode": "bigbird"}}), 1).problems == []


def test_a_key_of_another_mode_is_told():
    loaded = load({"train_batch_size": 1, "sparse_attention": {"mode": "bigbird", "num_local_blocks": 2}})
    assert DeepSpeedConfig(loaded).notes == [
        "sparse_attention.num_local_blocks: no effect: sparse_attention.mode is not fixed"
    ]
