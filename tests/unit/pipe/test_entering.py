"""What comes into a stage may be changed in place, unless the stage before needs it."""

from __future__ import annotations

import pytest
import torch

from deepspeed.pipe.executor import cut_off, entered


@pytest.mark.parametrize("shared", [True, False])
def test_layers_may_change_what_comes_in(shared):
    leaf = torch.tensor([[-1.0, 2.0], [3.0, -4.0]], requires_grad=True)
    (first, again), leaves = entered((leaf, leaf), shared=shared)
    assert first is again
    assert first.data_ptr() == leaf.data_ptr()
    (3 * first.relu_()).sum().backward()
    assert [each is leaf for each in leaves] == [True]
    assert leaf.grad.tolist() == [[0, 3], [3, 0]]


def test_a_change_of_what_the_stage_before_needs_is_noticed():
    weight = torch.ones(3, requires_grad=True)
    given = weight.tanh()  # whose backward needs what it gave
    inside, _ = entered(cut_off(given), shared=True)
    inside.relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        given.sum().backward()
