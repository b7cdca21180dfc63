"""Tiles, linear layers, estimators, exact bytes and Muon on parameters that are sharded over real ranks."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn

from deepspeed import comm
from deepspeed.fragments import StripedLayout
from deepspeed.memory import Spread, Widths, estimate_zero3_model_states_mem_needs_all_live, model_states
from deepspeed.ops.muon import Muon
from deepspeed.parallel import ParallelLayout
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.sharding import shard_module
from deepspeed.zero.piece import StatePiece
from deepspeed.zero.placement import Placement, ShardAxes
from deepspeed.zero.public.leaf import units_by_granularity
from deepspeed.zero.public.tiling import TiledLinear
from deepspeed.zero.states.groups import BlockGroup, Dtypes, ShardGroup
from deepspeed.zero.states.matrices import ShardedMatrices
from tests.harness import shared_ranks

DTYPES = Dtypes(torch.float32, torch.float32, torch.bfloat16)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False), nn.Linear(3, 3, bias=False)).to(
        dtype
    )


def groups_of(stage, module, options, dtypes=DTYPES):
    axis = ParallelLayout.build().world
    members = list(module.named_parameters())
    if stage == 3:
        group = ShardGroup(members, Placement(axis), dtypes, options)
        shards = shard_module(module, ShardAxes(lambda _: axis))
        group.layout = StripedLayout(tuple(shard.numel for shard in shards), axis.size)
        for shard in shards:
            if shard.local.numel():
                group.pieces.append(StatePiece(shard.name, shard.param, shard.shape, shard.interval, shard.local))
                group.pieces[-1].widen(dtypes.master, shard.device)
        return group
    return BlockGroup(members, Placement(axis), dtypes, options, gather=fetch.BlockGather(1 << 20))


@shared_ranks(2)
def test_tiles_take_over_a_sharded_layer_of_rank_0():
    torch.manual_seed(comm.get_rank())  # every rank has other values
    linear, plain = nn.Linear(7, 5), nn.Linear(7, 5)
    tiled = TiledLinear(7, 5, in_splits=2, out_splits=3)
    axis = ParallelLayout.build().world
    shards = shard_module(tiled, ShardAxes(lambda _: axis))
    for other in (linear, plain):
        if other is linear:
            shards += shard_module(linear, ShardAxes(lambda _: axis))
        tiled.copy_params_from(other)
        assert all(param.numel() == 0 for param in tiled.parameters())
        fetch.gather(shards)
        x = torch.ones(2, 7)
        expected = other(x).detach()
        comm.broadcast(expected, src=0)
        torch.testing.assert_close(tiled(x), expected)
        fetch.release(shards)


@shared_ranks(2)
def test_a_linear_layer_released_before_backward():
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    plain = nn.Linear(5, 3)
    plain.load_state_dict(layer.state_dict())
    world = ParallelLayout.build().world
    shards = shard_module(layer, ShardAxes(lambda _: world))
    x, y = (torch.linspace(0, 1, 10).view(2, 5).requires_grad_() for _ in range(2))
    fetch.gather(shards)
    loss = layer(x).square().sum()
    fetch.release(shards)
    fetch.gather(shards)
    loss.backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


@shared_ranks(2)
def test_sharded_parameters_count_whole():
    large, small = nn.Sequential(nn.Linear(3000, 1000), nn.Linear(1, 1)), Wrapped(model())
    axis = ParallelLayout.build().world
    shard_module(large, ShardAxes(lambda _: axis))
    shard_module(small, ShardAxes(lambda _: axis))
    assert list(units_by_granularity(small, 15)) == []
    assert list(units_by_granularity(small, 16)) == [""]  # 65 // 4
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        estimate_zero3_model_states_mem_needs_all_live(large)
    assert "3M total params, 3M largest layer params" in printed.getvalue()


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@shared_ranks(2, 3)
def test_bytes_are_those_of_the_plan(stage, dtype):
    """Parameters and masters, counted by the storages that hold them."""
    module, options = model(dtype), {}
    numels = [param.numel() for param in module.parameters()]
    group = groups_of(stage, module, options)
    params = list(module.parameters())
    held = [param._zero.data for param in params] if stage == 3 else params
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    masters = {
        piece.master.untyped_storage().data_ptr(): piece.master.untyped_storage().nbytes() for piece in group.pieces
    }
    own = sum(size for place, size in masters.items() if place not in found)
    width = 4 if dtype == torch.float32 else 2
    spread = Spread(stage, comm.get_world_size(), comm.get_rank())
    planned = model_states([numels], spread, widths=Widths(param=width, master=0 if width == 4 else 4))
    assert (sum(found.values()), own) == (planned.params, planned.masters)
    optimizer = torch.optim.Adam([piece.master for piece in group.pieces])
    for piece in group.pieces:
        piece.master.grad = torch.ones_like(piece.master)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in (state["exp_avg"], state["exp_avg_sq"])]
    assert sum(moment.numel() * moment.element_size() for moment in moments) == planned.optimizer


@pytest.mark.parametrize("stage", [2, 3])
@shared_ranks(2)
def test_muon_over_the_groups_of_a_stage(stage):
    module = model()
    plain = copy.deepcopy(module)
    expected = Muon(plain.parameters(), lr=0.1)
    optimizer = Muon([nn.Parameter(torch.empty(0))], lr=0.1)
    group = groups_of(stage, module, optimizer.param_groups[0])
    optimizer.param_groups[0]["params"] = [piece.master for piece in group.pieces]
    optimizer.whole = ShardedMatrices([group])
    for step in range(3):
        for place, param in enumerate(plain.parameters()):
            generator = torch.Generator().manual_seed(10 * step + place)
            param.grad = torch.randn(param.shape, generator=generator)
        for piece in group.pieces:
            start, stop = piece.interval
            piece.master.grad = plain.get_parameter(piece.name).grad.reshape(-1)[start:stop].clone()
        optimizer.step()
        expected.step()
    for piece in group.pieces:
        start, stop = piece.interval
        value = plain.get_parameter(piece.name).detach().reshape(-1)[start:stop]
        torch.testing.assert_close(piece.master.detach(), value, rtol=0, atol=1e-6)
