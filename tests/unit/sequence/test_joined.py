"""Chunks as one tensor: values and gradients of `torch.cat`, without a chunk that is there twice."""

from __future__ import annotations

import weakref

import pytest
import torch

from deepspeed.sequence.fpdt_layer import joined


def test_values_and_gradients_are_those_of_cat():
    torch.manual_seed(0)
    x, weight, flow = torch.randn(7, 3, requires_grad=True), torch.randn(3, requires_grad=True), torch.randn(7, 3)
    expected = torch.cat([(part * weight).sin() for part in x.split(2)])
    found = joined(((part * weight).sin() for part in x.split(2)), 7)
    assert torch.equal(found, expected)
    wanted = torch.autograd.grad(expected, [x, weight], flow)
    for _ in range(2):  # a second time through the same graph
        for mine, theirs in zip(torch.autograd.grad(found, [x, weight], flow, retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_chunk_is_gone_when_the_next_comes():
    known = []

    def chunks():
        for _ in range(4):
            assert all(each() is None for each in known)
            chunk = torch.ones(2, 3)
            known.append(weakref.ref(chunk))
            yield chunk
            del chunk

    assert torch.equal(joined(chunks(), 8), torch.ones(8, 3))


def test_frozen_chunks_have_no_graph():
    with torch.no_grad():
        assert not joined(iter([torch.ones(2, 1)]), 2).requires_grad
    mixed = joined([torch.ones(1), torch.ones(1, requires_grad=True)], 2)
    mixed.sum().backward()


def test_lengths_that_do_not_add_up():
    with pytest.raises(AssertionError, match="chunks of 2 for a length of 3"):
        joined([torch.ones(2)], 3)
