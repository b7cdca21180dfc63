"""The loss scale through the names of DeepSpeed's files."""

from __future__ import annotations

import pytest

from deepspeed.precision.scale import DynamicScale, NoScale, StaticScale
from deepspeed.runtime.saving.training_state import attributes_of, continue_scale


@pytest.mark.parametrize("overflows", [[], [0], [1, 2, 5], [0, 1, 2, 3]])
def test_a_scale_goes_on_where_it_was(overflows):
    scale = DynamicScale(2.0**8, window=2, hysteresis=2)
    for step in range(7):
        scale.update(step in overflows)
    other = DynamicScale(2.0**16, window=2, hysteresis=2)
    continue_scale(other, attributes_of(scale))
    for step in range(9):
        assert other.state_dict() == scale.state_dict()
        scale.update(step in (3, 4))
        other.update(step in (3, 4))


def test_stage_zero_of_deepspeed_stores_no_hysteresis():
    scale = DynamicScale(2.0**16, hysteresis=3)
    scale.update(True)
    saved = {"cur_scale": 256, "dynamic": True, "cur_iter": 3, "last_overflow_iter": -1, "scale_window": 1000}
    continue_scale(scale, saved)
    assert scale.state_dict() == {
        "scale": 256.0,
        "step": 3,
        "last_overflow": -1,
        "hysteresis_left": 3,
        "skipped_in_a_row": 0,
    }


def test_other_kinds_have_nothing_to_go_on_from():
    scale = DynamicScale(2.0**10)
    for attributes in (None, attributes_of(NoScale()), attributes_of(StaticScale(4.0))):
        continue_scale(scale, attributes)
        assert scale.value == 2.0**10
    static = StaticScale(4.0)
    continue_scale(static, attributes_of(scale))
    assert static.value == 4.0
