"""Schedules of a curriculum against DeepSpeed's numbers; batches cut to a length."""

from __future__ import annotations

import json
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deepspeed.data.curriculum import CurriculumScheduler, Ramp, cut_to_length
from deepspeed.data.pacing import BlockDrop, ProgressiveLayerDrop
from deepspeed.errors import DeepSpeedConfigError, UsageError
from tests.unit.data.oracle import FIXTURE, schedules

LINEAR = {
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}


def test_difficulties_are_those_of_deepspeed_but_never_below_the_minimum():
    expected = json.loads(FIXTURE.read_text())["schedules"]
    for (config, steps), values in zip(schedules(), expected, strict=True):
        quantum = config["schedule_config"].get("difficulty_step", 1)
        first = -(-config["min_difficulty"] // quantum) * quantum
        scheduler = CurriculumScheduler(config)
        found = [scheduler.get_difficulty(step) for step in steps]
        assert found == [min(max(value, first), config["max_difficulty"]) for value in values], config


def test_a_scheduler_goes_on_where_it_was():
    one, other = CurriculumScheduler(LINEAR), CurriculumScheduler({**LINEAR, "enabled": True, "curriculum_type": "x"})
    values = [one.update_difficulty(step) for step in range(1, 13)]
    assert values == [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64]
    other.set_state(one.get_state())
    assert other.get_current_difficulty() == 64 == other.update_difficulty(1), "at its maximum it stays"
    other.set_current_difficulty(8)
    assert other.update_difficulty(2) == 16
    custom = CurriculumScheduler({**LINEAR, "schedule_type": "custom", "schedule_config": {}})
    with pytest.raises(DeepSpeedConfigError, match="set_custom_curriculum_learning_schedule"):
        custom.update_difficulty(1)
    custom.set_custom_get_difficulty(lambda step: 8 * step)
    assert custom.update_difficulty(3) == 24


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"min_difficulty": None}, "min_difficulty is missing"),
        ({"min_difficulty": 65}, r"min_difficulty \(65\) exceeds max_difficulty \(64\)"),
        ({"schedule_type": "cubic"}, "schedule_type: .*fixed_root.* found 'cubic'"),
        ({"schedule_config": {"total_curriculum_step": 10}}, "difficulty_step is missing"),
        ({"schedule_config": {"total_curriculum_step": 10, "difficulty_step": 0}}, "greater than 0, found 0"),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1], "max_step": [2]}}, "one more"),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2, 3], "max_step": [4, 4]}}, "asc"),
    ],
)
def test_a_wrong_schedule_is_named(change, said):
    with pytest.raises(DeepSpeedConfigError, match=said):
        CurriculumScheduler({**LINEAR, **change})


def test_theta():
    drop = ProgressiveLayerDrop(theta=0.5, gamma=0.1)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    drop.update_state(10)
    assert drop.get_theta() == pytest.approx(0.5 * 2.718281828**-1 + 0.5)
    assert Ramp.decay(0.25, 0).at(9) == 1.0


def test_the_share_of_blocks_that_compute_is_that_of_the_formula():
    blocks = [nn.Linear(2, 2) for _ in range(6)]
    drop, theta, kept = BlockDrop(list(enumerate(blocks)), 6, seed=1), 0.4, []
    drop.choose(1.0, 0)
    nn.Sequential(*blocks)(torch.ones(1, 2))  # a block that never ran would run once to see what it returns
    with FlopCounterMode(display=False) as counter:
        for step in range(5000):
            drop.choose(theta, step)
            kept.append(6 - len(drop.dropped))
            if step < 20:
                hidden = torch.ones(1, 2)
                for block in blocks:
                    hidden = block(hidden)
    assert counter.get_total_flops() == sum(kept[:20]) * 2 * 2 * 2
    share = sum(1 - number / 6 * (1 - theta) for number in range(1, 7)) / 6
    assert sum(kept) == pytest.approx(share * 5000 * 6, rel=0.02)
    drop.close()


def test_batches_are_cut_wherever_their_tensors_are():
    pair = namedtuple("pair", "ids mask")
    tokens, causal, label = torch.arange(24).view(2, 12), torch.ones(2, 1, 12, 12), torch.ones(2)
    found = cut_to_length({"x": [label, torch.ones(2, 3)], "input_ids": tokens, "m": causal}, 5)
    assert found["input_ids"].view(-1).tolist() == tokens[:, :5].flatten().tolist(), "models view what they get"
    assert (found["m"].shape, found["x"][0].shape, found["x"][1].shape) == ((2, 1, 5, 5), (2,), (2, 3))
    assert cut_to_length(pair(tokens, causal), 5).mask.shape == (2, 1, 5, 5)
    assert cut_to_length((tokens, 3, None), 12)[0] is tokens
    assert cut_to_length((torch.ones(2, 12, 12), 3), 4)[0].shape == (2, 4, 12), "a width as long as the text stays"
    with pytest.raises(UsageError, match="no tensor of"):
        cut_to_length({"a": label}, 5)
