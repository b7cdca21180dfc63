"""Leaf modules: found by class, name of a class, path, suffix and config."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from deepspeed.config.zero import DEFAULT_LEAF_MODULE_CLASSES, DeepSpeedZeroLeafModuleConfig
from deepspeed.errors import UsageError
from deepspeed.log import logger
from deepspeed.zero.public.leaf import (
    apply_zero_leaf_module_config,
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Other(Expert):
    pass


@pytest.fixture
def model():
    return nn.Sequential(Expert(), Other(), nn.Linear(2, 2))


@pytest.fixture
def lines(caplog):
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_by_class_subclasses_too(model):
    assert set_z3_leaf_modules(model, [Expert]) == [model[0], model[1]]
    assert get_z3_leaf_modules(model) == [model[0], model[1]]
    assert model[0]._z3_leaf is True
    assert z3_leaf_module(model[1])
    assert not z3_leaf_module(model)
    assert unset_z3_leaf_modules(model, [Other]) == [model[1]]
    assert get_z3_leaf_modules(model) == [model[0]]
    assert model[1]._z3_leaf is False


@pytest.mark.parametrize("name", ["Other", f"{Other.__module__}.Other"])
def test_by_name_of_a_class(model, name):
    assert set_z3_leaf_modules(model, [name]) == [model[1]]
    assert unset_z3_leaf_modules(model, [name]) == [model[1]]
    assert get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules(model, name) == [model[1]]


def test_a_local_class_by_both_qualified_names():
    class Local(nn.Linear):
        pass

    model = nn.Sequential(Local(1, 1))
    for name in (f"{Local.__module__}.Local", f"{Local.__module__}.{Local.__qualname__}"):
        assert set_z3_leaf_modules(model, [name]) == [model[0]]


def test_several_classes_of_which_some_are_there(model):
    found = set_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear", "NoSuch", Other])
    assert found == [model[0].mlp, model[0].inner[0], model[1], model[1].mlp, model[1].inner[0], model[2]]


def test_classes_that_are_not_there(model):
    with pytest.raises(UsageError, match=r"no module of Sequential is of class \[NoSuch\].*Expert, Linear, Other"):
        set_z3_leaf_modules(model, ["NoSuch"])
    with pytest.raises(ValueError, match="no module"):
        unset_z3_leaf_modules(model, [nn.Conv2d])
    with pytest.raises(ValueError, match="no module"):
        set_z3_leaf_modules(model, [])
    assert set_z3_leaf_modules(model, ["NoSuch"], raise_if_not_found=False) == []
    with pytest.raises(AssertionError, match=r"classes or names of classes, found \[3\]"):
        set_z3_leaf_modules(model, [3])


def test_by_path(model):
    assert set_z3_leaf_modules_by_name(model, ["0.inner", "2", "2"]) == ([model[0].inner, model[2]], [])
    assert get_z3_leaf_modules(model) == [model[0].inner, model[2]]
    assert set_z3_leaf_modules_by_name(model, ["2"], flag=False) == ([model[2]], [])
    assert get_z3_leaf_modules(model) == [model[0].inner]
    assert set_z3_leaf_modules_by_name(model, ["x", "0"], raise_if_not_found=False) == ([model[0]], ["x"])
    assert set_z3_leaf_modules_by_name(model, [""]) == ([model], [])


def test_by_suffix(model):
    found, missing = set_z3_leaf_modules_by_suffix(model, ["mlp", "inner.0"])
    assert found == [model[0].mlp, model[1].mlp, model[0].inner[0], model[1].inner[0]]
    assert missing == []
    found, missing = set_z3_leaf_modules_by_suffix(model, ["1.mlp", "x"], raise_if_not_found=False)
    assert (found, missing) == ([model[1].mlp], ["x"])


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        (set_z3_leaf_modules_by_name, "no module named"),
        (set_z3_leaf_modules_by_suffix, "no module whose path ends with"),
    ],
)
def test_a_missing_name_marks_nothing(model, mark, text):
    with pytest.raises(UsageError, match=rf"{text} \[y\].*0.inner"):
        mark(model, ["0", "y"])
    assert get_z3_leaf_modules(model) == []


def test_config(model, lines):
    assert apply_zero_leaf_module_config(model, None) == []
    section = DeepSpeedZeroLeafModuleConfig(
        classes=["Other", "Absent"], names=["1", "2", "q"], name_suffixes=["mlp", "z"]
    )
    with lines.at_level(logging.WARNING, logger="deepspeed"):
        found = apply_zero_leaf_module_config(model, section)
    assert found == [model[1], model[2], model[0].mlp, model[1].mlp]
    assert get_z3_leaf_modules(model) == [model[0].mlp, model[1], model[1].mlp, model[2]]
    told = [record.getMessage() for record in lines.records]
    assert len(told) == 2
    assert "leaf_module.names" in told[0]
    assert "['q']" in told[0]
    assert "leaf_module.name_suffixes" in told[1]
    assert "['z']" in told[1]


def test_config_defaults(model, lines):
    assert apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig()) == []
    assert lines.records == []
    path, _, name = DEFAULT_LEAF_MODULE_CLASSES[0].rpartition(".")
    block = type(name, (nn.Linear,), {"__module__": path})
    model.append(block(1, 1))
    assert apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig()) == [model[3]]


def test_one_module_and_its_parameters(model):
    assert set_z3_leaf_module(model[2], True) is None
    assert get_z3_leaf_modules(model) == [model[2]]
    weight = model[2].weight
    assert not z3_leaf_parameter(weight)
    weight.ds_z3_leaf_module = model[2]
    assert z3_leaf_parameter(weight)
