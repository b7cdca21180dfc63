"""Units by granularity: which modules are too small for their number of descendants."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from deepspeed.log import logger
from deepspeed.zero.public.leaf import granularity, units_by_granularity


class Listed(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.members = nn.ModuleList(modules)


class Sequenced(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.members = nn.Sequential(*modules)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Listed(nn.Linear(4, 4), nn.Linear(1, 1))  # 22 // 3
        self.b = Sequenced(nn.Linear(4, 4), nn.Linear(4, 4))  # 40 // 3
        self.c = nn.Linear(1, 2)  # no children
        self.d = nn.Sequential(nn.Linear(50, 50))  # a container
        self.e = nn.ModuleDict({"q": Listed(nn.Linear(1, 1), nn.ReLU())})  # 2 // 3
        self.big = nn.Linear(100, 100)


@pytest.fixture
def lines(caplog):
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="deepspeed"):
        yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0, []),
        (-1, []),
        (1, ["e.q"]),
        (6, ["e.q"]),
        (7, ["a", "e.q"]),
        (12, ["a", "e.q"]),
        (13, ["a", "b", "e.q"]),
        (10**6, [""]),
    ],
)
def test_units(threshold, expected):
    model = Model()
    units = units_by_granularity(model, threshold)
    assert list(units) == expected
    assert all(model.get_submodule(path) is unit for path, unit in units.items())


def test_numbers():
    model = Model()
    assert granularity(model.a) == 22 // 3
    assert granularity(model.b) == 40 // 3
    assert granularity(model) == (22 + 40 + 4 + 2550 + 2 + 10100) // 13


def test_sharded_parameters_count_with_all_their_elements():
    model = Model()
    before = {threshold: list(units_by_granularity(model, threshold)) for threshold in (1, 7, 13, 10**6)}
    for param in model.parameters():
        param.ds_numel = param.numel()
        param.data = torch.empty(0)
    assert {threshold: list(units_by_granularity(model, threshold)) for threshold in before} == before


def test_marked_subtrees_and_shared_modules():
    model = Model()
    model.a._z3_leaf = True
    assert list(units_by_granularity(model, 7)) == ["e.q"]
    model.again = model.e["q"]
    assert list(units_by_granularity(model, 7)) == ["e.q"]


def test_one_line(lines):
    units_by_granularity(Model(), 7)
    (record,) = lines.records
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith("7 makes units of: a (Listed), e.q (Listed)")


def test_a_threshold_without_effect(lines):
    units_by_granularity(Listed(nn.Linear(4, 4)), 9)
    (record,) = lines.records
    assert record.levelno == logging.WARNING
    assert "smallest granularity in Listed is 10, of the whole model" in record.getMessage()
    units_by_granularity(nn.Linear(1, 1), 1)
    assert len(lines.records) == 1
