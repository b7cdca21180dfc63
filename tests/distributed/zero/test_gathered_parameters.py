"""GatheredParameters: whole for a while, edits kept or told to be lost, and what generation needs of it."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import log as logs
from deepspeed import zero
from deepspeed.errors import LostEditError, UsageError
from tests.harness import shared_ranks
from tests.models import batches, make, share


def warnings():
    """A list that collects what is told from now on."""
    told = []
    logs.warn_once.cache_clear()
    logs.logger.warning = told.append
    return told


def build(*sizes):
    with zero.Init():
        return nn.Sequential(*(nn.Linear(size, size) for size in sizes))


def engine_of(model, **keys):
    config = {
        "train_micro_batch_size_per_gpu": 12 // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **keys},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def rows(engine):
    return engine(*share(batches(1, 12)[0], dist.get_rank(), dist.get_world_size()))


@pytest.mark.parametrize("modifier", [0, 1])
@shared_ranks(2)
def test_the_modifier_decides(modifier):
    model = build(3)
    weight = model[0].weight
    with zero.GatheredParameters(weight, modifier_rank=modifier):
        assert weight.shape == (3, 3)
        assert weight.ds_status == zero.ZeroParamStatus.AVAILABLE
        weight.data.fill_(float(dist.get_rank() + 5))
    assert weight.numel() == 0
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full((3, 3), modifier + 5.0))


@shared_ranks(2)
def test_what_may_be_given():
    model = build(3, 2)
    ordinary = nn.Parameter(torch.ones(2))
    with zero.GatheredParameters([model[0].weight, ordinary, model[0].weight], modifier_rank=0):
        ordinary.data.add_(1)
        assert model[0].weight.shape == (3, 3)
        assert model[0].bias.numel() == 0
    assert torch.equal(ordinary, torch.full((2,), 2.0))
    for params in (model.parameters(), [ordinary], [], iter(())):
        with zero.GatheredParameters(params):
            pass
    with zero.GatheredParameters(model.parameters(), enabled=False):
        assert model[0].weight.numel() == 0
    with zero.GatheredParameters([model[0].weight, ordinary], modifier_rank=0):
        model[0].weight = nn.Parameter(torch.zeros(3, 3))  # as clients resize embeddings
    assert model[0].weight.shape == (3, 3)


@shared_ranks(2)
def test_data_may_be_replaced():
    weight = build(3)[0].weight
    with zero.GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.full((3, 3), 2.0)
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full((3, 3), 2.0))
    with pytest.raises(UsageError, match=r"shape \(4,\) instead of \(3, 3\)"), zero.GatheredParameters(weight, 0):
        weight.data = torch.zeros(4)


@shared_ranks(2)
def test_nested_contexts():
    model = build(3)
    weight, bias = model[0].weight, model[0].bias
    told = warnings()
    with zero.GatheredParameters([weight, bias], modifier_rank=0):
        with zero.GatheredParameters(weight):
            weight.data.fill_(1.0)
        assert weight.shape == (3, 3), "the outer context still needs it"
        with torch.no_grad():
            weight.add_(1.0)
    assert weight.numel() == 0
    assert told == []
    with zero.GatheredParameters(weight):
        with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
            weight.add_(float(dist.get_rank()))
        assert torch.equal(weight, torch.full((3, 3), 3.0))
    assert told == [], "the inner context kept the edit"
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full((3, 3), 3.0))


@pytest.mark.parametrize("persistence", [0, 1000])
@shared_ranks(2)
def test_a_lost_edit_is_told(persistence):
    """Also where only one rank edits, and where the parameter stays whole anyway."""
    engine = engine_of(make(), stage3_param_persistence_threshold=persistence)
    weight, told = engine.module.up.weight, warnings()
    with zero.GatheredParameters(weight):
        before = weight.detach().clone()
    assert told == []
    with zero.GatheredParameters(weight):
        if dist.get_rank() == 0:
            weight.data.zero_()
            with torch.no_grad():
                weight.add_(1.0)
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, before)
    assert len(told) == (dist.get_rank() == 0)
    assert not told or ("up.weight" in told[0] and "modifier_rank=0" in told[0])
    loss = rows(engine)
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("made", ["plainly", "in shards"])
@shared_ranks(2)
def test_a_lost_edit_is_an_error_where_that_is_asked_for(made):
    keys = {"stage": 3, "enable_sanity_checks": True}
    if made == "plainly":
        weight = engine_of(make(), **keys).module.up.weight
    else:
        with zero.Init(config_dict_or_path={"zero_optimization": keys}):
            weight = nn.Linear(3, 3).weight
    with pytest.raises(LostEditError, match="modifier_rank"), zero.GatheredParameters(weight), torch.no_grad():
        weight.add_(1.0)
    assert weight.numel() == 0
    assert weight._zero.holds == 0


@shared_ranks(2)
def test_a_modifier_outside_the_group():
    weight = build(3)[0].weight
    outside = zero.GatheredParameters(weight, modifier_rank=2)
    with pytest.raises(UsageError, match=r"modifier_rank is 2, but .* lies on 2 ranks"), outside:
        pass
    assert weight.numel() == 0


@shared_ranks(4)
def test_the_modifier_is_a_rank_of_the_group():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with zero.Init(data_parallel_group=pairs[dist.get_rank() // 2]):
        layer = nn.Linear(2, 2)
    with zero.GatheredParameters(layer.weight, modifier_rank=1):
        layer.weight.data.fill_(float(dist.get_rank()))
    with zero.GatheredParameters(layer.weight):
        assert layer.weight[0, 0].item() == (1.0 if dist.get_rank() < 2 else 3.0)


@shared_ranks(2)
def test_an_exception_lets_go():
    weight = build(3)[0].weight
    with pytest.raises(KeyError), zero.GatheredParameters(weight, modifier_rank=0):
        raise KeyError
    assert weight.numel() == 0
    assert weight._zero.holds == 0


@shared_ranks(2)
def test_calls_of_plain_torch_that_find_nothing_are_told():
    engine = engine_of(make())
    told = warnings()
    state = engine.module.state_dict(keep_vars=True)
    assert told == []
    assert state["up.weight"] is engine.module.up.weight
    state = engine.module.up.state_dict()
    assert state.keys() == {"weight", "bias"}
    assert state["weight"].numel() == 0
    engine.module.state_dict()
    assert len(told) == 1
    assert "module_state_dict" in told[0]
    assert "GatheredParameters" in told[0]
    engine.backward(rows(engine))
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    assert len(told) == 2
    assert "gradient_clipping" in told[1]
    engine.step()
    loaded = pickle.loads(pickle.dumps(engine.module.up.weight))
    assert type(loaded) is nn.Parameter
    assert loaded.numel() == 0
    assert len(told) == 3
    assert "pickled" in told[2]
    assert "up.weight" in told[2]
    with zero.GatheredParameters(engine.module.parameters()):
        assert engine.module.state_dict()["up.weight"].shape == (24, 8)
    assert len(told) == 3
    engine.destroy()
    logs.warn_once.cache_clear()
    engine.module.state_dict()
    assert len(told) == 3, "hooks go with the engine"


@pytest.mark.parametrize("stage", [2, 3])
@shared_ranks(1, 2)
def test_generation_with_whole_weights_and_without_hooks(stage):
    engine = engine_of(make(), stage=stage)
    plain = engine_of(make(), stage=stage)
    for _ in range(2):
        for each in (engine, plain):
            each.backward(rows(each))
            each.step()
        with zero.unwrap_model_for_generation(engine) as module, torch.no_grad():
            assert module is engine.module
            assert all(param.shape == getattr(param, "ds_shape", param.shape) for param in module.parameters())
            assert not any(each._forward_pre_hooks for each in module.modules())
            for _ in range(2 + dist.get_rank()):  # as many tokens as this rank likes
                module(*batches(1, 2)[0])
        assert rows(engine).item() == rows(plain).item()
    if stage == 3 and dist.get_world_size() > 1:
        assert all(param.numel() == 0 for param in engine.module.parameters())
