"""The loss scale: its trajectory, its bounds, its state."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.precision.scale import LARGEST_SCALE, DynamicScale, LossScaleError, NoScale, StaticScale


def simulate(pattern, *, init, window, hysteresis, consecutive, minimum):
    """The rule told another way: by counting clean steps and tolerated overflows. Ends at the fatal overflow."""
    scale, patience, clean = init, hysteresis - 1, 0
    values = []
    for overflow in pattern:
        if overflow:
            clean = 0
            if patience:
                patience -= 1
            elif scale == minimum:
                return values, True
            else:
                scale = max(scale / 2, minimum)
        else:
            clean += 1
            doubles = clean > 1 and (clean - 1) % window == 0
            if doubles or consecutive:
                patience = hysteresis - 1
            if doubles and scale < LARGEST_SCALE:
                scale = scale * 2
        values.append(scale)
    return values, False


SETTINGS = {
    "init": st.integers(0, 18).map(lambda power: 2.0**power),
    "window": st.integers(1, 6),
    "hysteresis": st.integers(1, 4),
    "consecutive": st.booleans(),
    "minimum": st.sampled_from([0.25, 1.0, 3.0, 4.0]),
    "pattern": st.lists(st.booleans(), max_size=120),
}


@given(**SETTINGS)
def test_the_trajectory_is_that_of_the_rule(init, window, hysteresis, consecutive, minimum, pattern):
    init = max(init, minimum)
    scale = DynamicScale(init, window, hysteresis, consecutive, minimum)
    seen, fatal = [], False
    for overflow in pattern:
        try:
            scale.update(overflow)
        except LossScaleError:
            fatal = True
            break
        seen.append(scale.value)
    settings = {"init": init, "window": window, "hysteresis": hysteresis, "consecutive": consecutive}
    assert (seen, fatal) == simulate(pattern, minimum=minimum, **settings)


@given(cut=st.integers(0, 120), **SETTINGS)
def test_a_resumed_scale_continues(cut, init, window, hysteresis, consecutive, minimum, pattern):
    init = max(init, minimum)
    settings = (window, hysteresis, consecutive, minimum, False)
    whole = DynamicScale(init, *settings)
    for overflow in pattern[:cut]:
        whole.update(overflow)
    resumed = DynamicScale(2.0**20, *settings)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for overflow in pattern[cut:]:
        whole.update(overflow)
        resumed.update(overflow)
        assert resumed.value == whole.value
    assert resumed.state_dict() == whole.state_dict()


def run(scale, pattern):
    values = []
    for mark in pattern:
        scale.update(mark == "x")
        values.append(scale.value)
    return values


def test_the_first_doubling_is_at_step_index_window():
    assert run(DynamicScale(4.0, window=3), "." * 8) == [4, 4, 4, 8, 8, 8, 16, 16]


def test_after_an_overflow_the_window_begins_anew():
    assert run(DynamicScale(4.0, window=3, hysteresis=1), "..x....") == [4, 4, 2, 2, 2, 2, 4]


def test_hysteresis_is_spent_once_and_refilled_by_a_doubling():
    scale = DynamicScale(64.0, window=2, hysteresis=2)
    assert run(scale, "x") == [64], "the first overflow is tolerated"
    assert run(scale, ".x.x") == [64, 32, 32, 16], "clean steps between do not refill"
    assert run(scale, "...") == [16, 16, 32]
    assert run(scale, "xx") == [32, 16], "the doubling did"


def test_consecutive_hysteresis_is_refilled_by_every_clean_step():
    assert run(DynamicScale(64.0, window=9, consecutive_hysteresis=True), "x.x.xx.x") == [64] * 5 + [32] * 3


def test_a_halving_does_not_go_below_the_minimum():
    assert run(DynamicScale(8.0, hysteresis=1, minimum=3.0), "xx") == [4, 3]


def test_another_overflow_at_the_minimum_ends_training_with_advice():
    scale = DynamicScale(2.0, hysteresis=1)
    run(scale, ".x.x"[:2])
    with pytest.raises(LossScaleError) as caught:
        scale.update(True)
    text = str(caught.value)
    assert "2 steps in a row were skipped" in text
    assert "loss scale, 1, is at its minimum, 1" in text
    for hint in ("learning rate", "NaN", "gradient_clipping", "bf16.enabled"):
        assert hint in text
    assert "min_loss_scale" not in text, "1 is the least that the key may be"
    assert isinstance(caught.value, DeepSpeedError)
    assert isinstance(caught.value, RuntimeError)


def test_one_step_and_a_high_minimum_are_said_as_they_are():
    with pytest.raises(LossScaleError, match=r"^1 step was skipped.*lower fp16\.min_loss_scale"):
        DynamicScale(64.0, hysteresis=1, minimum=64.0).update(True)


def test_the_scale_may_stay_at_its_minimum_instead():
    assert run(DynamicScale(2.0, hysteresis=1, raise_at_minimum=False), "xxx") == [1, 1, 1]


def test_doubling_stops_before_fp32_overflows():
    scale = DynamicScale(2.0**126, window=1, hysteresis=1)
    assert run(scale, "." * 6)[-1] == LARGEST_SCALE
    assert torch.isfinite(torch.tensor(LARGEST_SCALE))
    assert not torch.isfinite(torch.tensor(LARGEST_SCALE * 2))


@pytest.mark.parametrize(
    "settings",
    [
        {"hysteresis": 0},
        {"hysteresis": -1},
        {"window": 0},
        {"minimum": 0},
        {"init": 0},
        {"init": float("inf")},
        {"init": float("nan")},
        {"init": 2.0, "minimum": 4.0},
        {"factor": 1.0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(DeepSpeedConfigError):
        DynamicScale(**settings)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), 2.0**128])
def test_a_static_scale_is_a_positive_number(value):
    with pytest.raises(DeepSpeedConfigError):
        StaticScale(value)


def test_no_scale_and_a_static_scale_do_not_move():
    for scale, value in ((NoScale(), 1.0), (StaticScale(128), 128.0)):
        assert not scale.dynamic
        run(scale, "x.x")
        scale.load_state_dict(DynamicScale().state_dict())
        assert scale.value == value
    assert DynamicScale().dynamic
    assert NoScale().state_dict() == {}


def test_a_scale_of_one_does_not_multiply():
    loss = torch.tensor(3.0)
    for scale in (NoScale(), StaticScale(1), DynamicScale(1.0)):
        assert scale.apply(loss) is loss


@pytest.mark.parametrize("scale", [StaticScale(2.0**16), DynamicScale(2.0**16)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_scaled_loss_is_finite_and_exact(scale, dtype):
    loss = torch.tensor(3.5, dtype=dtype, requires_grad=True)
    scaled = scale.apply(loss)
    assert scaled.item() == 3.5 * 2**16
    assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    scaled.backward()
    assert loss.grad.dtype == dtype


def test_state_of_another_kind_starts_anew():
    scale = DynamicScale(64.0)
    for state in (NoScale().state_dict(), StaticScale(8).state_dict()):
        scale.load_state_dict(state)
    assert scale.value == 64.0


def test_state_that_is_incomplete_is_refused():
    state = DynamicScale().state_dict()
    del state["hysteresis_left"]
    with pytest.raises(LossScaleError, match="hysteresis_left"):
        DynamicScale().load_state_dict(state)
    with pytest.raises(DeepSpeedConfigError, match="saved loss scale"):
        DynamicScale().load_state_dict({**DynamicScale().state_dict(), "scale": float("nan")})


def test_saved_state_is_fitted_into_changed_settings():
    state = {**DynamicScale(2.0, hysteresis=4).state_dict()}
    scale = DynamicScale(64.0, hysteresis=2, minimum=8.0)
    scale.load_state_dict(state)
    assert (scale.value, scale.state_dict()["hysteresis_left"]) == (8.0, 2)
    assert repr(scale) == "DynamicScale(8, window=1000, hysteresis=2 of 2, minimum=8)"
