"""Gradients as one tensor: the same values, and memory that is used again only if nobody else has it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.zero.gradients.replicated import SMALL_BYTES, PackedGradients

SHAPES = ((3, 4), (5,), (), (2, 1, 2))


def parameters():
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def step(pack, params, factor):
    """A step as a reducer takes it, after which each gradient is `factor`; where its memory is."""
    for param in params:
        param.grad = torch.full_like(param, factor)
    with torch.no_grad():
        flat = pack.fill([param.grad for param in params])
        for param, view in zip(params, pack.views(flat), strict=True):
            param.grad = view
    assert all(torch.equal(param.grad, torch.full_like(param, factor)) for param in params)
    return flat.data_ptr()


def clear(params):
    for param in params:
        param.grad = None


def test_memory_is_used_again():
    params = parameters()
    pack = PackedGradients(params, again=True)
    first = step(pack, params, 1.0)
    for factor in (2.0, 3.0):
        clear(params)
        assert step(pack, params, factor) == first
    assert PackedGradients([], again=True).fill([torch.ones(2)]).tolist() == [1, 1]


@pytest.mark.parametrize(
    "keep",
    [
        lambda param: param.grad,
        lambda param: param.grad.detach(),
        lambda param: param.grad.view(-1)[:1],
        lambda param: param.grad.numpy(),
        lambda param: param.grad.untyped_storage(),
    ],
)
def test_what_somebody_kept_is_left_alone(keep):
    params = parameters()
    pack = PackedGradients(params, again=True)
    step(pack, params, 1.0)
    kept = keep(params[0])
    before = torch.as_tensor(kept).clone() if not isinstance(kept, torch.UntypedStorage) else kept.tolist()
    clear(params)
    step(pack, params, 2.0)
    if isinstance(kept, torch.UntypedStorage):
        assert kept.tolist() == before
    else:
        assert torch.equal(torch.as_tensor(kept), before)
    clear(params)
    address = step(pack, params, 3.0)
    clear(params)
    assert step(pack, params, 4.0) == address


def test_gradients_that_were_not_cleared():
    params = parameters()
    pack = PackedGradients(params, again=True)
    step(pack, params, 1.0)
    with torch.no_grad():
        for param in params:
            param.grad.add_(1)
        for param, view in zip(params, pack.views(pack.fill([param.grad for param in params])), strict=True):
            param.grad = view
    assert all(torch.equal(param.grad, torch.full_like(param, 2)) for param in params)


def test_large_gradients_are_let_go():
    for like, again in ((nn.Parameter(torch.zeros(SMALL_BYTES // 4 + 1)), True), (nn.Parameter(torch.zeros(1)), False)):
        pack = PackedGradients([like], again=again)
        flat = pack.fill([torch.ones_like(like)])
        pack.views(flat)
        assert pack.fill([torch.ones_like(like)]) is not flat
