"""Muon over shards on real ranks: the update of the single process, each matrix computed once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.fragments import ContiguousLayout, StripedLayout
from deepspeed.ops.muon import Muon, MuonWithAuxAdam
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.groups import Dtypes, ShardGroup
from deepspeed.zero.states.matrices import ShardedMatrices
from tests.harness import shared_ranks

SHAPES = [(6, 12), (12, 5), (3, 4, 8), (1, 2), (4, 2, 3, 3), (7, 7), (9, 4)]
WIDE = Dtypes(torch.float32, torch.float32, torch.float32)
LAYOUTS = {"block": ContiguousLayout, "striped": StripedLayout}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shards(kind, params, options, names=None):
    """A group whose pieces are this rank's intervals."""
    rank, world = comm.get_rank(), comm.get_world_size()
    axis = SimpleNamespace(rank=rank, size=world, group=comm.get_world_group())
    group = ShardGroup(
        [(name, p) for name, p in enumerate(params)] if names is None else names, Placement(axis), WIDE, options
    )
    group.layout = LAYOUTS[kind](tuple(param.numel() for param in params), world)
    for place, param in enumerate(params):
        start, stop = group.layout.interval(place, rank)
        if start < stop:
            part = param.detach().reshape(-1)[start:stop].clone()
            group.pieces.append(StatePiece(str(place), param, param.shape, (start, stop), part))
    return group


def give(group, grads):
    for piece in group.pieces:
        place = next(at for at, param in enumerate(group.params) if param is piece.param)
        start, stop = piece.interval
        grad = grads[place]
        piece.master.grad = None if grad is None else grad.reshape(-1)[start:stop].clone()


def check(group, plain, states, expected):
    for piece in group.pieces:
        place = next(at for at, param in enumerate(group.params) if param is piece.param)
        start, stop = piece.interval
        mine = (piece.master.detach(), states[piece.master]["momentum_buffer"])
        theirs = (plain[place].detach(), expected[plain[place]]["momentum_buffer"])
        for left, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(left, right.reshape(-1)[start:stop], rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
@shared_ranks(1, 2, 3, 4)
def test_the_update_of_one_process(kind):
    params = [nn.Parameter(normal(*shape, seed=place)) for place, shape in enumerate(SHAPES)]
    plain = [nn.Parameter(param.detach().clone()) for param in params]
    for each in (params, plain):
        each[0].muon_num_heads = 3
    expected = Muon(plain, lr=0.1, weight_decay=0.1)
    optimizer = Muon([nn.Parameter(torch.empty(0))], lr=0.1, weight_decay=0.1)
    options = optimizer.param_groups[0]
    # one optimizer group over two shard groups, as parameters of two dtypes would be
    groups = [shards(kind, params[:4], options), shards(kind, params[4:], options)]
    options["params"] = [piece.master for group in groups for piece in group.pieces]
    optimizer.whole = ShardedMatrices(groups)
    for step in range(4):
        grads = [normal(*shape, seed=100 * step + place) for place, shape in enumerate(SHAPES)]
        if step == 1:
            grads[1][0, 0] = float("nan")  # only the first rank's part
        if step == 2:
            grads[5] = None
        for group, part in zip(groups, (grads[:4], grads[4:]), strict=True):
            give(group, part)
        for param, grad in zip(plain, grads, strict=True):
            param.grad = grad
        optimizer.step()
        expected.step()
    for group, part in zip(groups, (plain[:4], plain[4:]), strict=True):
        check(group, part, optimizer.state, expected.state)


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
@shared_ranks(2)
def test_every_matrix_is_computed_once(kind):
    params = [nn.Parameter(normal(8, 8, seed=place)) for place in range(6)]
    group = shards(kind, params, {})
    masters = [piece.master for piece in group.pieces]
    counted = []

    def rule(places, wholes):
        counted.extend(int(whole[0, 0]) for whole in wholes)
        return [whole + 1 for whole in wholes]

    for piece in group.pieces:
        place = next(at for at, param in enumerate(params) if param is piece.param)
        with torch.no_grad():
            piece.master.fill_(float(place))
    results = dict(ShardedMatrices([group]).apply(group.options, masters, [m.detach() for m in masters], rule))
    assert sorted(results) == list(range(len(masters)))
    for place, master in enumerate(masters):
        assert torch.equal(results[place], master + 1)
    everyone = [None, None]
    comm.all_gather_object(everyone, counted)
    assert sorted(place for each in everyone for place in each) == list(range(6))
    assert [len(each) for each in everyone] == [3, 3]


@shared_ranks(2)
def test_both_halves_and_a_group_that_one_rank_holds_nothing_of():
    weights = [nn.Parameter(normal(6, 12)), nn.Parameter(normal(1, 2, seed=3))]
    plain = [nn.Parameter(param.detach().clone()) for param in weights]
    expected = MuonWithAuxAdam([{"params": [param], "use_muon": True} for param in plain])
    none = [{"params": [nn.Parameter(torch.empty(0))], "use_muon": True} for _ in weights]
    optimizer = MuonWithAuxAdam(none)
    # two elements in a block of two: all of it lies on the first rank
    groups = [shards("block", [param], options) for param, options in zip(weights, optimizer.param_groups, strict=True)]
    for group, options in zip(groups, optimizer.param_groups, strict=True):
        options["params"] = [piece.master for piece in group.pieces]
    assert len(groups[1].pieces) == (comm.get_rank() == 0)
    optimizer.whole = ShardedMatrices(groups)
    exchange, sizes = comm.all_to_all_single, []
    comm.all_to_all_single = lambda *args, **kwargs: (sizes.append(args[1].numel()), exchange(*args, **kwargs))
    for step in range(2):
        for at, (group, param) in enumerate(zip(groups, plain, strict=True)):
            param.grad = normal(*param.shape, seed=7 * step + at)
            give(group, [param.grad])
        optimizer.step()
        expected.step()
    for group, param in zip(groups, plain, strict=True):
        check(group, [param], optimizer.state, expected.state)
    # there and back, in every step, for the matrix that lies on both ranks
    assert len(sizes) == 4


@shared_ranks(2)
def test_a_vector_is_refused_on_every_rank_by_name():
    params = [nn.Parameter(normal(4, 4)), nn.Parameter(normal(2, seed=1))]
    optimizer = Muon([nn.Parameter(torch.empty(0))])
    options = optimizer.param_groups[0]
    group = shards("block", params, options, list(zip(["layer.weight", "layer.bias"], params, strict=True)))
    options["params"] = [piece.master for piece in group.pieces]
    optimizer.whole = ShardedMatrices([group])
    give(group, [torch.ones(4, 4), torch.ones(2)])
    with pytest.raises(UsageError, match=r"layer.bias: Muon updates parameters of 2 dims or more, found shape \(2,\)"):
        optimizer.step()
