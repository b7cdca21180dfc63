"""The public loss-scaler classes: attributes, pickles, the same trajectory as the state machine."""

import inspect
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.precision.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
from deepspeed.precision.scale import DynamicScale, LossScaleError

# What a checkpoint of DeepSpeed holds of such an object.
PICKLED = {
    "cur_scale",
    "dynamic",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "cur_hysteresis",
    "consecutive_hysteresis",
    "raise_error_at_min_scale",
    "dtype",
}


def scaler(**changes):
    settings = {
        "init_scale": 2**8,
        "scale_window": 3,
        "min_scale": 1,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": False,
    }
    return DynamicLossScaler(**{**settings, **changes})


def test_signatures():
    assert str(inspect.signature(LossScaler)).startswith("(scale: 'float' = 1)")
    assert list(inspect.signature(DynamicLossScaler).parameters) == [
        "init_scale",
        "scale_window",
        "min_scale",
        "delayed_shift",
        "consecutive_hysteresis",
        "raise_error_at_min_scale",
        "dtype",
    ]


def test_attributes_at_the_start():
    assert vars(LossScaler(scale=128)) == {"cur_scale": 128, "dynamic": False}
    found = vars(scaler())
    assert set(found) == PICKLED
    assert (found["cur_scale"], found["cur_iter"], found["last_overflow_iter"]) == (256, 0, -1)
    assert (found["scale_factor"], found["cur_hysteresis"], found["dtype"]) == (2.0, 2, torch.float16)
    assert scaler().dynamic
    assert scaler().loss_scale == 256


@given(st.lists(st.booleans(), max_size=60), st.booleans(), st.integers(1, 3))
def test_it_follows_the_state_machine(pattern, consecutive, hysteresis):
    old = scaler(consecutive_hysteresis=consecutive, delayed_shift=hysteresis)
    new = DynamicScale(2.0**8, 3, hysteresis, consecutive, 1.0, False)
    for overflow in pattern:
        old.update_scale(overflow)
        new.update(overflow)
        state = new.state_dict()
        assert old.loss_scale == new.value
        assert (old.cur_iter, old.last_overflow_iter) == (state["step"], state["last_overflow"])
        assert old.cur_hysteresis == state["hysteresis_left"]


def test_an_object_with_only_deepspeeds_attributes_continues():
    written = {key: value for key, value in vars(scaler(delayed_shift=1)).items() if key in PICKLED}
    read = DynamicLossScaler.__new__(DynamicLossScaler)
    read.__dict__.update(written)
    read.update_scale(True)
    assert read.cur_scale == 128
    again = pickle.loads(pickle.dumps(read))
    again.update_scale(True)
    assert again.cur_scale == 64


def test_the_end_is_told_with_the_number_of_skipped_steps():
    ending = scaler(init_scale=2, delayed_shift=1, raise_error_at_min_scale=True)
    ending.update_scale(True)
    with pytest.raises(LossScaleError, match="2 steps in a row"):
        ending.update_scale(True)


def test_settings_are_checked_at_once():
    with pytest.raises(DeepSpeedConfigError, match="hysteresis"):
        scaler(delayed_shift=0)


def test_backward_scales():
    parameter = torch.nn.Parameter(torch.tensor(2.0))
    LossScaler(scale=8).backward(parameter * 3)
    assert parameter.grad == 24
    loss = parameter * 3
    scaler().backward(loss, retain_graph=True)
    scaler().backward(loss)
    assert parameter.grad == 24 + 2 * 3 * 256
    assert LossScaler(scale=8).scale_loss(torch.tensor(2.0)) == 16


def test_the_static_scaler_ignores_updates():
    static = LossScaler(scale=16)
    static.update_scale(True)
    assert static.loss_scale == 16
    assert isinstance(static, LossScalerBase)
