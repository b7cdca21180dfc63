"""Models that were constructed in shards, under an engine: the same training, the same contracts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import zero
from deepspeed.errors import UsageError
from tests.harness import shared_ranks
from tests.models import Tiny, batches, make, share
from tests.sharded_models import settings, train, whole


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(1, 3)
def test_training_equals_that_of_a_model_made_plainly(precision):
    config = settings(precision)
    plain = train(make(), config)
    torch.manual_seed(dist.get_rank())
    with zero.Init(config_dict_or_path=config):
        model = Tiny()
    assert model.head.weight is model.embedding.weight
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert {param.dtype for param in model.parameters()} == {dtype}
    sharded = train(model, config)
    assert sharded[0] == plain[0]
    for name, mine in sharded[1].items():
        assert torch.equal(mine, plain[1][name]), name


@shared_ranks(1, 2)
def test_an_optimizer_made_before_the_engine():
    config = settings() | {"optimizer": {}}
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with zero.Init(enabled=enabled):
            model = Tiny()
        decayed, others = [model.up.weight, model.down.weight], [model.embedding.weight, *model.norm.parameters()]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others}], lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for batch in batches(3, 12):
            engine.backward(engine(*share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
        results.append(whole(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@shared_ranks(1, 2)
def test_a_stage_that_cannot_use_shards_is_an_error():
    with zero.Init():
        model = Tiny()
    with pytest.raises(UsageError, match=r"zero\.Init, but zero_optimization\.stage is 2"):
        deepspeed.initialize(model=model, config=settings(stage=2))


@shared_ranks(1, 2)
def test_the_engine_gives_shards_its_dtype():
    with zero.Init():
        model = make()
    values = whole(model)
    engine, *_ = deepspeed.initialize(model=model, config=settings("bf16"))
    for name, param in whole(engine.module).items():
        assert torch.equal(param, values[name].bfloat16()), name


@shared_ranks(1, 2)
def test_frozen_shards_beside_new_ordinary_parameters():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, tokens, labels):
            hidden = self.base.embedding(tokens)
            hidden = hidden + self.up(self.down(hidden))
            return nn.functional.cross_entropy(self.base.head(hidden).flatten(0, 1), labels.flatten())

    def build(context):
        torch.manual_seed(0)
        with context:
            base = Tiny()
        base.requires_grad_(False)
        return Adapted(base)

    config = settings()
    plain = train(build(zero.Init(enabled=False)), config)
    mixed = build(zero.Init())
    assert mixed.down.weight.shape == (2, 8)
    before = whole(mixed.base)
    losses, params, engine = train(mixed, config)
    assert losses == plain[0]
    assert all(torch.equal(params[name], plain[1][name]) for name in params)
    assert all(torch.equal(params[f"base.{name}"], value) for name, value in before.items())
    names = (
        {piece.name for group in engine._parts.sharded.states.groups for piece in group.pieces}
        if (dist.get_world_size() > 1)
        else {"down.weight", "up.weight"}
    )
    assert names <= {"down.weight", "up.weight"}


@shared_ranks(1)
def test_on_one_rank_an_engine_keeps_parameters_whole_without_copies():
    with zero.Init():
        model = Tiny()
    memory = {name: param.ds_tensor.data_ptr() for name, param in model.named_parameters()}
    plain = Tiny()
    addresses = [param.data_ptr() for param in plain.parameters()]
    deepspeed.initialize(model=model, config=settings())
    deepspeed.initialize(model=plain, config=settings())
    for name, param in model.named_parameters():
        assert param.data_ptr() == memory[name] == param.ds_tensor.data_ptr()
        assert param.shape == param.ds_shape
        assert param.ds_status == zero.ZeroParamStatus.AVAILABLE
    assert [param.data_ptr() for param in plain.parameters()] == addresses
    assert plain.up.weight.ds_shape == (24, 8)


@shared_ranks(1, 2)
def test_a_model_may_have_a_second_engine_after_the_first():
    config = settings("bf16", stage3_param_persistence_threshold=100)
    with zero.Init(config_dict_or_path=config):
        model = make()
    first = train(model, config)
    first[2].destroy()
    engine, *_ = deepspeed.initialize(model=model, config=settings("fp32"))
    for name, param in whole(engine.module).items():
        assert torch.equal(param, first[1][name].float()), name
