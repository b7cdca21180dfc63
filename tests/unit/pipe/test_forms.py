"""What travels between stages comes out as it went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import PipelineError
from deepspeed.pipe.messages import MessageForm, flatten, unflatten

TENSORS = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
PLAIN = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.none())
VALUES = st.recursive(
    st.one_of(TENSORS, PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


@given(VALUES)
def test_a_structure_comes_out_as_it_went_in(value):
    form, tensors = flatten(value)
    told = MessageForm.parse(form.text())
    assert told == form
    assert same(value, unflatten(told, tensors))


def test_a_tensor_that_is_there_twice_travels_once():
    tensor = torch.ones(2)
    form, tensors = flatten({"a": tensor, "b": (tensor, 1)})
    assert len(tensors) == 1
    back = unflatten(form, tensors)
    assert back["a"] is back["b"][0]


def test_one_and_true_are_different_forms():
    assert flatten((1,))[0] != flatten((True,))[0] != flatten((1.0,))[0]


def test_other_objects_are_refused():
    with pytest.raises(PipelineError, match="a stage gave a set"):
        flatten((torch.ones(1), {1}))


@given(st.one_of(TENSORS, VALUES), TENSORS)
def test_the_form_of_a_tensor_by_itself_is_known_without_flattening(value, other):
    form = flatten(value)[0]
    assert form.is_of(value) is isinstance(value, torch.Tensor)
    assert form.is_of(other) is (form == flatten(other)[0])
    if other.is_floating_point():
        assert not flatten(other)[0].is_of(other.detach().requires_grad_()), "a gradient would come back for it"
