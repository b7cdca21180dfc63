"""Muon over fragments: with any way to put matrices together it does as over the matrices themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepspeed.fragments import ContiguousLayout, StripedLayout
from deepspeed.ops.muon import Muon, MuonWithAuxAdam, muon_update

SHAPES = [(6, 12), (12, 5), (3, 4, 8), (4, 2, 3, 3), (7, 7)]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Together:
    """All ranks in one process: the optimizer's parameters are the fragments of every rank, one after the other."""

    def __init__(self, layout, params):
        self.owned, self.fragments = [], []
        for rank in range(layout.world):
            for place, param in enumerate(params):
                start, stop = layout.interval(place, rank)
                if start < stop:
                    self.owned.append((place, start, stop))
                    self.fragments.append(nn.Parameter(param.detach().reshape(-1)[start:stop].clone()))
        self.params = params
        self.calls = 0

    def parameter(self, param):
        return self.params[self._of(param)[0]]

    def _of(self, param):
        return self.owned[next(at for at, each in enumerate(self.fragments) if each is param)]

    def apply(self, group, params, fragments, rule):
        self.calls += 1
        wholes, first = {}, {}
        for place, (param, fragment) in enumerate(zip(params, fragments, strict=True)):
            index, start, stop = self._of(param)
            wholes.setdefault(index, torch.full((self.params[index].numel(),), float("inf")))[start:stop] = fragment
            first.setdefault(index, place)
        results = rule([first[i] for i in wholes], [whole.view(self.params[i].shape) for i, whole in wholes.items()])
        results = dict(zip(wholes, results, strict=True))
        for place, param in enumerate(params):
            index, start, stop = self._of(param)
            yield place, results[index].reshape(-1)[start:stop]

    def give(self, grads):
        for fragment, (place, start, stop) in zip(self.fragments, self.owned, strict=True):
            grad = grads[place]
            fragment.grad = None if grad is None else grad.reshape(-1)[start:stop].clone()

    def whole(self, values):
        result = [torch.empty(param.numel()) for param in self.params]
        for value, (place, start, stop) in zip(values, self.owned, strict=True):
            result[place][start:stop] = value.detach()
        return [each.view(param.shape) for each, param in zip(result, self.params, strict=True)]


def layouts():
    numels = tuple(torch.Size(shape).numel() for shape in SHAPES)
    return [
        ContiguousLayout(numels, 3),
        StripedLayout(numels, 4),
        ContiguousLayout(numels, 50),
        StripedLayout(numels, 1),
    ]


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize("nan", [False, True])
def test_as_over_matrices(layout, nan):
    params = [nn.Parameter(normal(*shape, seed=place)) for place, shape in enumerate(SHAPES)]
    params[0].muon_num_heads = 3
    plain = copy.deepcopy(params)
    plain[0].muon_num_heads = 3
    whole = Together(layout, params)
    mine = Muon(whole.fragments, lr=0.1, weight_decay=0.1)
    mine.whole = whole
    theirs = Muon(plain, lr=0.1, weight_decay=0.1)
    for step in range(3):
        grads = [normal(*shape, seed=100 * step + place) for place, shape in enumerate(SHAPES)]
        if nan and step == 1:
            grads[1][0, 0] = float("nan")
            grads[2][-1, -1, -1] = float("inf")
        if step == 2:
            grads[3] = None
        whole.give(grads)
        for param, grad in zip(plain, grads, strict=True):
            param.grad = grad
        mine.step()
        theirs.step()
    assert whole.calls == 3
    momenta = [mine.state[fragment]["momentum_buffer"] for fragment in whole.fragments]
    for place, (value, momentum) in enumerate(zip(whole.whole(whole.fragments), whole.whole(momenta), strict=True)):
        torch.testing.assert_close(value, plain[place].detach(), rtol=0, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(momentum, theirs.state[plain[place]]["momentum_buffer"], rtol=0, atol=1e-7)


def test_the_halves_of_muon_with_adam():
    numels = (72,)
    weight, bias = nn.Parameter(normal(6, 12)), nn.Parameter(normal(5, seed=1))
    whole = Together(StripedLayout(numels, 2), [weight])
    part = nn.Parameter(bias.detach().clone())
    mine = MuonWithAuxAdam(
        [{"params": whole.fragments, "use_muon": True}, {"params": [part], "use_muon": False}], adam_w_mode=False
    )
    mine.whole = whole
    theirs = MuonWithAuxAdam(
        [{"params": [weight], "use_muon": True}, {"params": [bias], "use_muon": False}], adam_w_mode=False
    )
    for step in range(2):
        weight.grad, bias.grad = normal(6, 12, seed=step + 5), normal(5, seed=step + 9)
        part.grad = bias.grad.clone()
        whole.give([weight.grad])
        mine.step()
        theirs.step()
    assert torch.equal(part, bias)
    torch.testing.assert_close(whole.whole(whole.fragments)[0], weight.detach(), rtol=0, atol=1e-6)
    assert mine.state_dict()["state"][0]["momentum_buffer"].shape == (36,)


def test_alike_matrices_together(monkeypatch):
    """The batches that only accelerators take."""
    monkeypatch.setattr("deepspeed.ops.muon.muon.alike", lambda keys, tensors: [[0, 2, 1], [3]])
    params = [nn.Parameter(normal(4, 9, seed=place)) for place in range(3)] + [nn.Parameter(normal(5, 5))]
    plain = copy.deepcopy(params)
    whole = Together(StripedLayout((36, 36, 36, 25), 2), params)
    mine, theirs = Muon(whole.fragments), Muon(plain)
    mine.whole = whole
    grads = [normal(*param.shape, seed=20 + place) for place, param in enumerate(params)]
    grads[1][2, 2] = float("inf")
    whole.give(grads)
    for param, grad in zip(plain, grads, strict=True):
        param.grad = grad
    mine.step()
    theirs.step()
    for value, param in zip(whole.whole(whole.fragments), plain, strict=True):
        torch.testing.assert_close(value, param.detach(), rtol=0, atol=1e-5, equal_nan=True)


def test_ranks_without_anything_take_part():
    class Counted:
        calls = 0

        def apply(self, group, params, fragments, rule):
            self.calls += 1
            assert (list(params), list(fragments)) == ([], [])
            return iter(())

    empty = nn.Parameter(torch.empty(0))
    optimizer = Muon([empty])
    optimizer.whole = Counted()
    optimizer.step()
    assert optimizer.whole.calls == 1


def test_tall_heads_of_the_gram_way():
    grad = normal(16, 3)
    update = muon_update(grad, torch.zeros(16, 3), num_heads=2)
    halves = [muon_update(half, torch.zeros(8, 3)) for half in grad.split(8)]
    torch.testing.assert_close(update, torch.cat(halves))
