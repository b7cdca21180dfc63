"""How tensors are cut, as files tell it: read back as written, and refused where it covers no dim once."""

from __future__ import annotations

import pytest

from deepspeed.checkpoint.formats.adapters import plain_splits, splits_in
from deepspeed.errors import CheckpointError
from deepspeed.fragments import DimSplit, even


def test_read_back_as_written():
    splits = {
        "a": DimSplit.of(1, [even(7, 3)]),
        "b": DimSplit.of(0, [even(4, 2), [(4, 5), (5, 6)]]),
        "copies": DimSplit.of(0, [[(0, 2), (0, 2), (2, 4)]]),
    }
    assert splits_in(plain_splits(splits), "here") == splits
    assert splits_in(None, "here") == {}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        [0],
        [0, [[[0, 2]], [[3, 4]]]],
        [0, [[[0, 2]], [[1, 4]]]],
        [0, [[[0, 2], [0, 2]], [[2, 4]]]],
        [-1, [[[0, 2]]]],
        [0, [[[0, -2]]]],
        [0, [[[0, 2.0]]]],
        [0, []],
        [0, [["ab"]]],
        [0, [[[0, 2**50]]]],
        [64, [[[0, 2]]]],
    ],
)
def test_what_covers_no_dim_once_is_refused(entry):
    with pytest.raises(CheckpointError, match="here: how 'a' is cut"):
        splits_in({"a": entry}, "here")
