"""Moments in 8 bits: what codes stand for, what steps do to them, and state dicts."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.ops import blockwise
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

CPU = (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad)
ALL = (*CPU, FusedAdam, FusedLion)


def coded(values, *, signed, noise=None):
    codes = torch.zeros(values.numel(), dtype=torch.uint8)
    scales = torch.zeros(blockwise.blocks(values.numel()))
    blockwise.encode(values, codes, scales, signed=signed, dither=noise)
    return codes, scales


def back(values, *, signed, noise=None):
    return blockwise.decode(*coded(values, signed=signed, noise=noise), signed=signed)


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_stands_for_itself(signed):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes != 0x80] if signed else codes  # a negative zero is a zero
    values = blockwise.decode(codes, torch.ones(1), signed=signed)
    for noise in (None, blockwise.dither(codes.numel(), 7, signed=signed)):
        again, scales = coded(values, signed=signed, noise=noise)
        assert scales.tolist() == [1.0]
        assert torch.equal(again, codes)


@given(st.integers(1, 600), st.floats(-30, 30), st.booleans(), st.integers(0, 10**6))
def test_values_come_back_within_half_a_step(numel, exponent, signed, seed):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    values = values if signed else values.square()
    largest = values.abs().view(-1).max()
    # to nearest: a sixteenth of the value; below the smallest code of its block a value with a sign is lost
    error = (back(values, signed=signed) - values).abs()
    bound = values.abs() / 16 + (largest * 2.0**-14 if signed else largest * 2.0**-30)
    assert bool((error <= bound * 1.0001).all())


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_at_random_is_right_in_the_mean(signed):
    value = 1.3
    values = torch.full((4 * blockwise.BLOCK,), value)
    values[:: blockwise.BLOCK] = 1.5  # so that 1.3 is no largest element
    noise = [blockwise.dither(values.numel(), step, signed=signed) for step in range(1, 101)]
    found = torch.stack([back(values, signed=signed, noise=each) for each in noise])
    assert set(found[:, 1].tolist()) == {1.25, 1.375}
    assert found[:, 1:100].mean().item() == pytest.approx(value, abs=0.003)


def test_a_second_moment_does_not_become_zero():
    values = torch.tensor([1.0, 1e-30, 0.0])
    assert back(values, signed=False).tolist()[1] > 0
    assert back(values, signed=False).tolist()[2] == 0
    assert back(torch.zeros(5), signed=False).tolist() == [0] * 5


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad):
    assert not back(torch.tensor([1.0, bad]), signed=False)[1].isfinite()


def trained(cls, steps=3, **arguments):
    params = [
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3))) for shape in [(30, 20), (5,)]
    ]
    optimizer = cls(params, lr=1e-2, **arguments)
    advance(params, optimizer, range(steps))
    return params, optimizer


def advance(params, optimizer, steps):
    for step in steps:
        for param in params:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("way", ["state dict", "pickle", "deepcopy"])
def test_training_goes_on_from_a_copy_to_the_bit(cls, way):
    params, optimizer = trained(cls, moment_bits=8)
    if way == "state dict":
        others = [nn.Parameter(param.detach().clone()) for param in params]
        other = cls(others, lr=1e-2, moment_bits=8)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        other = pickle.loads(pickle.dumps(optimizer)) if way == "pickle" else copy.deepcopy(optimizer)
        others = other.param_groups[0]["params"]
    assert other.moment_bits == 8
    advance(params, optimizer, range(3, 6))
    advance(others, other, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(("saved", "loaded"), [(None, 8), (8, None), (8, 16), (16, 8)])
def test_states_of_another_width_are_rounded(cls, saved, loaded):
    params, optimizer = trained(cls, moment_bits=saved)
    other = cls([nn.Parameter(param.detach().clone()) for param in params], lr=1e-2, moment_bits=loaded)
    other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(params, other.param_groups[0]["params"], strict=True):
        assert set(other.state[theirs]) == {"step", *(name for name, _, _ in other.state_layout(theirs))}
        for name in cls.moments:
            kept, taken = optimizer.moment(mine, name).float(), other.moment(theirs, name).float()
            assert taken.shape == mine.shape
            assert bool(((kept - taken).abs() <= kept.abs() / 15 + kept.abs().max() * 2.0**-14).all())


def test_states_of_other_parameters_are_refused():
    _, optimizer = trained(DeepSpeedCPUAdam, moment_bits=8)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_scale"] = torch.zeros(1)
    other = DeepSpeedCPUAdam([nn.Parameter(torch.zeros(30, 20)), nn.Parameter(torch.zeros(5))], moment_bits=8)
    with pytest.raises(UsageError, match=r"600 codes .* and 1 scales in exp_avg .*expected 600 of uint8 and 3"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("bits", [None, 16, 8])
def test_moments_are_read_and_written_as_values(bits):
    params, optimizer = trained(DeepSpeedCPUAdam, moment_bits=bits)
    optimizer.set_moment(params[0], "exp_avg_sq", torch.full((600,), 0.25))
    assert torch.equal(optimizer.moment(params[0], "exp_avg_sq").float(), torch.full((30, 20), 0.25))
    assert optimizer.moment(params[0], "exp_avg").float().norm() > 0


def test_a_config_does_not_take_the_width_away():
    params, optimizer = trained(DeepSpeedCPUAdam, moment_bits=8)
    assert optimizer.hold_states(torch.float32)
    advance(params, optimizer, range(3, 4))
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.uint8
