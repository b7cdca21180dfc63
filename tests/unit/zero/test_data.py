"""Writes into a parameter are counted, whichever way they take, and data that was replaced comes home."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.errors import UsageError
from deepspeed.zero.parameters.data import plain_data, reclaim, show, writes
from deepspeed.zero.parameters.parameter import ResidentParameter, WholeParameter, watch


def watched(*shape):
    param = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape))
    watch("it", param)
    assert type(param) is WholeParameter
    return param


def test_every_write_counts():
    param = watched(2, 3)
    known = writes(param)

    def counted():
        nonlocal known
        before, known = known, writes(param)
        return known > before

    early = param.data
    assert not counted(), "reading is no write"
    with torch.no_grad():
        param.zero_()
    assert counted()
    param.data.add_(1)
    assert counted()
    param.data[0, 1:] = 5
    assert counted()
    early.mul_(2)
    assert counted()
    with torch.inference_mode():
        param.data.add_(1)
    assert counted()
    plain_data(param).add_(1)
    assert not counted()
    param.data = param.data.clone()
    param.data.add_(1)
    assert counted(), "in other memory, too"
    assert not param.data.requires_grad
    assert param._version == 1, "autograd sees no more than of any other parameter"


def test_replaced_data_is_not_kept():
    param = watched(4)
    storage = StorageWeakRef(param.data.untyped_storage())
    param.data = torch.ones(4)
    assert storage.expired()


def test_replaced_data_comes_home():
    param, home = watched(2, 2), torch.zeros(2, 2)
    assert reclaim("it", param, home)
    assert param.data_ptr() == home.data_ptr()
    assert torch.equal(home, torch.arange(4.0).view(2, 2))
    assert not reclaim("it", param, home)
    param.data = param.data.double() * 2
    assert reclaim("it", param, home)
    assert param.dtype == torch.float32
    assert torch.equal(home, torch.tensor([[0.0, 2.0], [4.0, 6.0]]))
    show(param, home.t())  # the same memory in another order
    assert reclaim("it", param, home)
    assert torch.equal(home, torch.tensor([[0.0, 4.0], [2.0, 6.0]]))
    param.data = torch.zeros(3)
    with pytest.raises(UsageError, match=r"it came back with the shape \(3,\) instead of \(2, 2\)"):
        reclaim("it", param, home)


def test_copies_are_ordinary():
    param = watched(3)
    param.data.add_(1)
    for other in (copy.deepcopy(param), pickle.loads(pickle.dumps(param)), type(param)(torch.ones(2))):
        assert type(other) is nn.Parameter
    watch("it", param, ResidentParameter)
    assert type(param) is ResidentParameter
    watch("it", param)
    assert type(param) is ResidentParameter, "it goes on to notice more"


class Own(nn.Parameter):
    """A script's own class of parameters."""

    tag = "own"


class Fixed(nn.Parameter):
    """One with an idea of its own of what its data is."""

    data = property(lambda self: self.detach())


def test_a_class_of_the_users_own_is_watched_too():
    param = Own(torch.ones(3))
    watch("it", param)
    known = writes(param)
    param.data.add_(1)
    assert writes(param) > known
    assert isinstance(param, Own)
    assert param.tag == "own"
    watch("it", param, ResidentParameter)
    assert isinstance(param, ResidentParameter)
    other = copy.deepcopy(param)
    assert type(other) is Own
    assert torch.equal(other, param)
    assert type(type(param)(torch.ones(2))) is Own
    assert torch.equal(pickle.loads(pickle.dumps(param)), param)


def test_a_class_that_cannot_be_watched_is_named(monkeypatch):
    said = []
    monkeypatch.setattr("deepspeed.zero.parameters.parameter.warn_once", said.append)
    param = Fixed(torch.ones(3))
    watch("layer.weight", param)
    assert type(param) is Fixed
    assert "layer.weight is a Fixed, whose class cannot be extended" in said[0]
