"""Blocks of a model that are compiled: one graph for all of them, no break in it, the same training."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.compile_blocks import repeated_blocks
from tests.harness import ranks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.back(torch.nn.functional.silu(self.wide(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, depth=3, width=8):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def engine_of(stage, model=None, **sections):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }
    return deepspeed.initialize(model=model or Tower(), config=config)[0]


def train(stage, *, compiled, width=8, **sections):
    torch.manual_seed(0)
    engine = engine_of(stage, Tower(width=width), **sections)
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        engine.compile(backend="aot_eager")
        assert engine.is_compiled
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = engine(torch.randn(2, 4, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    counters = torch._dynamo.utils.counters
    found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    engine.destroy()
    assert not any("forward" in module.__dict__ for module in engine.module.modules()), "everything is put back"
    return losses, found


@ranks(2, compiles=True)
def test_the_same_losses_from_one_graph():
    for stage in (0, 2, 3):
        plain, _ = train(stage, compiled=False)
        mine, (graphs, breaks) = train(stage, compiled=True)
        assert mine == pytest.approx(plain, rel=1e-5), stage
        assert (graphs, breaks) == (1, 0), stage


@ranks(2, compiles=True)
def test_products_of_8_bits_in_one_graph():
    """With kernels around them, at every stage; the graph computes what the layers compute without it."""
    for stage, scaling in ((0, "tensor"), (1, "row"), (2, "tensor"), (3, "block"), (3, "row")):
        sections = {"fp8": {"enabled": True, "scaling": scaling}, "fused_kernels": {"enabled": stage == 3}}
        exact, _ = train(stage, compiled=False, width=32)
        plain, _ = train(stage, compiled=False, width=32, **sections)
        mine, (graphs, breaks) = train(stage, compiled=True, width=32, **sections)
        assert mine == pytest.approx(plain, rel=1e-4), (stage, scaling)
        assert mine != exact, f"at stage {stage} with {scaling} nothing was rounded"
        assert (graphs, breaks) == (1, 0), (stage, scaling)


@ranks(1)
def test_what_is_compiled_is_chosen_by_the_config():
    engine = engine_of(0, compile={"region": "model"})
    engine.compile(backend="eager")
    assert not any("forward" in block.__dict__ for block in engine.module.blocks)
    module = engine.module
    assert module._compiled_call_impl is not None
    engine.destroy()
    assert module._compiled_call_impl is None, "it is taken back"
    engine = engine_of(0, nn.Linear(4, 1), compile={"region": "blocks"})
    with pytest.raises(DeepSpeedConfigError, match=r"compile\.region is 'blocks', but Linear has no list"):
        engine.compile(backend="eager")
    engine.destroy()


def test_blocks_are_found_in_the_outermost_lists():
    tower = Tower()
    assert repeated_blocks(tower) == list(tower.blocks)
    nested = nn.ModuleList(nn.Sequential(Block(4), Block(4)) for _ in range(2))
    assert repeated_blocks(nn.ModuleDict({"inner": nested})) == list(nested)
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []  # too small to be worth it
    assert repeated_blocks(nn.ModuleList([Block(4)])) == []
