"""Trees of arguments taken apart and put together; the pure helpers of the public module."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.runtime.activation_checkpointing.call import join_tensors, split_tensors
from deepspeed.runtime.activation_checkpointing.checkpointing import (
    CheckpointingError,
    detach_variable,
)

Pair = namedtuple("Pair", "left right")
LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.builds(torch.zeros, st.integers(0, 3)))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


def same(left, right):
    """Equal trees of equal kinds with the very same leaves."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left is right


@given(TREES)
def test_a_tree_comes_back(tree):
    tensors, rest = split_tensors(tree)
    assert not any(isinstance(leaf, torch.Tensor) for leaf in _leaves(rest))
    assert same(join_tensors(rest, tensors), tree)


def _leaves(tree):
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]


def test_what_holds_no_tensor_stays_the_same_object():
    seen, options = [], {"a": [1, 2]}
    tensors, rest = split_tensors((torch.ones(1), seen, options))
    rebuilt = join_tensors(rest, tensors)
    assert rebuilt[1] is seen
    assert rebuilt[2] is options


def test_subclasses_of_dict_keep_what_they_know():
    class Output(OrderedDict):
        pass

    output = Output(loss=torch.ones(2))
    output.note = "kept"
    tensors, rest = split_tensors(output)
    assert output["loss"] is tensors[0]
    back = join_tensors(rest, [torch.zeros(2)])
    assert type(back) is Output
    assert back.note == "kept"
    assert back["loss"].sum() == 0


def test_detach_variable():
    x = torch.ones(2, requires_grad=True)
    y, text, z = detach_variable((x * 2, "a", torch.ones(1)))
    assert y.is_leaf
    assert y.requires_grad
    assert text == "a"
    assert not z.requires_grad
    assert detach_variable((x,), device="meta")[0].device.type == "meta"
    with pytest.raises(CheckpointingError, match="list"):
        detach_variable([x])
