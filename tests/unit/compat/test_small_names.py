"""Names that scripts use and the library does not: each does what its name says."""

from __future__ import annotations

import collections
import importlib
import random

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime import config, utils

Pair = collections.namedtuple("Pair", "one two")


def test_moving_structures():
    tensor = torch.ones(1)
    moved = utils.move_to_device({"a": (tensor, [3, None]), "b": Pair(tensor, "x")}, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1] == [3, None]
    assert moved["b"].one.is_meta
    assert moved["b"].two == "x"
    assert not tensor.is_meta
    param = nn.Parameter(torch.ones(2))
    assert utils.move_to_device([param], "cpu", lambda x: isinstance(x, nn.Parameter))[0] is param


def test_the_seed_reaches_every_generator():
    numpy = pytest.importorskip("numpy")
    drawn = []
    for _ in range(2):
        utils.set_random_seed(7)
        drawn.append((random.random(), float(torch.rand(())), float(numpy.random.rand())))
    assert drawn[0] == drawn[1]


def test_a_model_on_another_device_and_dtype():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Embedding(4, 2))
        steps = torch.arange(3)
        explicit = torch.zeros(2, dtype=torch.float64)
        here = torch.ones(2, device="cpu")
    assert {(param.dtype, param.device.type) for param in model.parameters()} == {(torch.bfloat16, "meta")}
    assert steps.dtype == torch.int64
    assert explicit.dtype == torch.bfloat16
    assert (here.dtype, here.device.type) == (torch.bfloat16, "cpu")
    assert torch.ones(1).dtype == torch.float32
    assert torch.ones(1).device.type == "cpu"


def test_on_device_may_be_off_nested_and_left_by_an_error():
    with deepspeed.OnDevice(dtype=torch.half, device="meta", enabled=False):
        assert torch.ones(1).dtype == torch.float32
    context = deepspeed.OnDevice(dtype=torch.half, device="cpu")
    with pytest.raises(KeyError), context, context:
        assert torch.ones(1).dtype == torch.half
        raise KeyError("x")
    assert torch.get_default_dtype() == torch.float32


def test_importing_the_module_of_a_name_does_not_hide_the_name():
    module = importlib.import_module("deepspeed.utils.z3_leaf_module")
    assert module.z3_leaf_module is deepspeed.utils.z3_leaf_module
    assert callable(deepspeed.utils.z3_leaf_module)


def test_what_scripts_ask(capsys):
    param = nn.Parameter(torch.ones(1))
    assert utils.is_model_parallel_parameter(param) is False
    param.tensor_model_parallel = True
    assert utils.is_model_parallel_parameter(param) is True
    utils.see_memory_usage("here", force=True)
    assert (config.LAMB_OPTIMIZER, config.DeepSpeedConfig) == ("lamb", deepspeed.DeepSpeedConfig)
