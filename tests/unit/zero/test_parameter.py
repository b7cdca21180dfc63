"""What a sharded parameter shows, on one rank and without a process group."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.zero.birth.init import TouchedParameters
from deepspeed.zero.parameters.gather import finish
from deepspeed.zero.parameters.parameter import ZeroParameter, shard_parameter
from deepspeed.zero.parameters.shard import ZeroParamStatus, shard_of


class One:
    """An axis of one rank."""

    rank, size, ranks = 0, 1, (0,)


class Special(nn.Parameter):
    """A kind of parameter that a client defines."""


def sharded(values=(1.0, 2.0, 3.0), kind=nn.Parameter):
    param = kind(torch.tensor(values))
    shard_parameter(param, One()).release()
    return param


def test_one_rank_shares_memory():
    param = nn.Parameter(torch.arange(6.0).view(2, 3))
    address = param.data_ptr()
    shard = shard_parameter(param, One())
    shard.release()
    assert param.numel() == 0
    assert param.ds_tensor.data_ptr() == address
    finish([shard])
    assert param.data_ptr() == address
    assert param.shape == (2, 3)
    shard.release()
    shard.convert(torch.bfloat16, torch.device("cpu"))
    assert param.dtype == torch.bfloat16
    finish([shard])
    assert torch.equal(param, torch.arange(6.0).view(2, 3).bfloat16())
    assert shard.data.data_ptr() == param.data_ptr()


def test_kinds_of_parameters():
    param = sharded(kind=Special)
    assert isinstance(param, Special)
    assert isinstance(param, ZeroParameter)
    assert param.ds_numel == 3
    made = type(param)(torch.ones(2), requires_grad=False)
    assert type(made) is Special, "clients make new parameters of the class of old ones"
    assert not made.requires_grad
    assert type(ZeroParameter(torch.ones(2))) is nn.Parameter


def test_copies():
    param = sharded()
    twin = copy.deepcopy(param)
    assert type(twin) is ZeroParameter
    assert twin.numel() == 0
    assert twin.requires_grad
    assert torch.equal(twin.ds_tensor, torch.tensor([1.0, 2.0, 3.0]))
    assert twin.ds_id != param.ds_id
    finish([shard_of(twin)])
    twin.data.zero_()
    assert torch.equal(param.ds_tensor, torch.tensor([1.0, 2.0, 3.0]))
    finish([shard_of(param)])
    whole = copy.deepcopy(param)
    assert whole.ds_status == ZeroParamStatus.AVAILABLE
    assert torch.equal(whole, param)
    shard_of(param).holds = 1
    assert type(copy.deepcopy(param)) is nn.Parameter
    first, second = copy.deepcopy([param, param])
    assert first is second
    assert type(pickle.loads(pickle.dumps(param))) is nn.Parameter


def test_gradients_are_ordinary():
    param = sharded()
    finish([shard_of(param)])
    (param * 2).sum().backward()
    assert torch.equal(param.grad, torch.full((3,), 2.0))
    param.grad = torch.zeros(3)
    assert not param.grad.any()
    param.grad = None
    assert param.grad is None


def test_replaced_data_of_another_shape():
    param = sharded()
    finish([shard_of(param)])
    param.data = torch.zeros(2, 2)
    with pytest.raises(UsageError, match=r"\(2, 2\) instead of \(3,\)"):
        shard_of(param).store()


def test_touch_in_a_frame():
    param, touch = sharded(), TouchedParameters()
    with touch:
        with touch.frame():
            assert (param.shape, param.dim(), param.size(0), param.numel(), len(param)) == ((3,), 1, 3, 3, 3)
            assert not shard_of(param).whole, "the shape is known without the values"
            assert param.requires_grad
            assert param.dtype == torch.float32
            assert hash(param)
            assert param.grad is None
            param.requires_grad_(False)
            assert not shard_of(param).whole
            nn.init.constant_(param, 4.0)
            assert not shard_of(param).whole, "it was written, and nobody can hold a view"
            view = param.data[1:]
            assert shard_of(param).whole
            view.zero_()
            param.data = param.data + 1
        assert param.numel() == 0
        assert shard_of(param).holds == 0
        torch.nn.init.constant_(param, 9.0)
        assert torch.equal(param.ds_tensor, torch.full((3,), 9.0)), "also outside of a frame"
        assert param.shape == (0,)
    assert not torch.overrides._get_current_function_mode_stack()


def test_touch_lets_go_after_an_exception():
    param, touch = sharded(), TouchedParameters()
    with touch:
        with pytest.raises(KeyError), touch.frame():
            param.data.zero_()
            raise KeyError
        assert param.numel() == 0
        assert shard_of(param).holds == 0


def test_a_parameter_of_a_sharded_one():
    param, touch = sharded(), TouchedParameters()
    before = nn.Parameter.__new__
    with touch, touch.in_parameters(), touch.frame():
        assert torch.equal(nn.Parameter(param), torch.tensor([1.0, 2.0, 3.0]))
    assert nn.Parameter.__new__ is before
