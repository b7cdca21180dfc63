"""The list of a model's parameters follows every change of its modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.runtime.backward import ModelParameters


def nested():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.ModuleDict({"inner": nn.Linear(2, 2)})))


def add_parameter(model):
    model[1][0].scale = nn.Parameter(torch.ones(2))


def add_submodule(model):
    model[1][1]["inner"].adapter = nn.Linear(2, 2)


def add_to_the_added(model):
    add_submodule(model)
    model[1][1]["inner"].adapter.more = nn.Sequential(nn.Linear(2, 2))


def replace_by_setattr(model):
    model[1][1]["inner"].weight = nn.Parameter(torch.ones(2, 2))


def delete_parameter(model):
    del model[1][1]["inner"].bias


def delete_submodule(model):
    del model[1][1]["inner"]


def set_none(model):
    model[1][1]["inner"].bias = None


def write_the_dict(model):
    model[1][1]["inner"]._parameters["weight"] = nn.Parameter(torch.ones(2, 2))


def replace_the_dict(model):
    inner = model[1][1]["inner"]
    inner._parameters = {**inner._parameters, "weight": nn.Parameter(torch.ones(2, 2))}


def swap_modules(model):
    model[0], model[1][1]["inner"] = model[1][1]["inner"], model[0]


def tie(model):
    model[0].weight = model[1][1]["inner"].weight


CHANGES = [
    add_parameter,
    add_submodule,
    add_to_the_added,
    replace_by_setattr,
    delete_parameter,
    delete_submodule,
    set_none,
    write_the_dict,
    replace_the_dict,
    swap_modules,
    tie,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_nested_modules_is_noticed(change):
    model = nested()
    parameters = ModelParameters(model)
    before = list(map(id, parameters()))
    change(model)
    expected = list(map(id, model.parameters()))
    assert list(map(id, parameters())) == expected != before


def test_an_unchanged_model_is_not_walked(monkeypatch):
    model = nested()
    parameters = ModelParameters(model)
    parameters()
    monkeypatch.setattr(nn.Module, "named_modules", None)
    assert len(parameters()) == 4


def test_a_scripted_model():
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    parameters = ModelParameters(model)
    for _ in range(2):
        assert list(map(id, parameters())) == list(map(id, model.parameters()))


def test_an_empty_model():
    model = nn.Module()
    parameters = ModelParameters(model)
    assert parameters() == []
    model.weight = nn.Parameter(torch.ones(1))
    assert parameters() == [model.weight]
