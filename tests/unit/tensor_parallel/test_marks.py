"""Splits that Megatron's marks tell of."""

from __future__ import annotations

from torch import nn

from deepspeed.fragments import DimSplit
from deepspeed.tensor_parallel.apply import marked_splits


def marked(dim=None, stride=None):
    layer = nn.Linear(3, 4)
    layer.weight.tensor_model_parallel = True
    if dim is not None:
        layer.weight.partition_dim = dim
    if stride is not None:
        layer.weight.partition_stride = stride
    return layer


def test_marks_tell():
    model = nn.Sequential(marked(0), marked(1, 1), nn.Linear(2, 2))
    assert marked_splits(model, 2, ()) == {
        "0.weight": DimSplit(0, (((0, 4),), ((4, 8),))),
        "1.weight": DimSplit(1, (((0, 3),), ((3, 6),))),
    }
    assert set(marked_splits(model, 2, {"0.weight"})) == {"1.weight"}
    assert marked_splits(nn.Linear(2, 2), 2, ()) == {}


def test_marks_that_do_not_tell():
    for layer in (marked(), marked(2), marked(-1), marked(0, 2)):
        assert marked_splits(nn.Sequential(marked(0), layer), 2, ()) is None
