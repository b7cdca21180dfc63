"""Plain models with experts under ZeRO 3: ranks that choose different experts do not ask each other for each."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import get_z3_leaf_modules, safe_get_full_fp32_param, set_z3_leaf_module
from tests.distributed.moe.models import Model as Layers
from tests.distributed.moe.models import StackedModel
from tests.harness import ranks, shared_ranks

WIDTH = 8


class Block(nn.Module):
    """As many models write it: a router, and a list of experts of which some are used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens):
        scores = self.gate(tokens).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(tokens)
        for number in best.unique().tolist():
            rows = (best == number).nonzero().view(-1)
            out = out.index_add(0, rows, self.experts[number](tokens[rows]) * scores[rows, number, None])
        return tokens + out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens).square().mean()


def config():
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }


def batches(step, world):
    """Few tokens, so that ranks choose different experts."""
    return torch.randn(world, 3, WIDTH, generator=torch.Generator().manual_seed(step)) * 3


@ranks(2)
def test_blocks_of_experts_are_one_unit():
    torch.manual_seed(0)
    model = Model()
    plain, asking = copy.deepcopy(model), copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, config=config())
    assert get_z3_leaf_modules(model) == list(model.layers)
    for layer in asking.layers:
        set_z3_leaf_module(layer, False)
    slow, *_ = deepspeed.initialize(model=asking, config=config())
    assert get_z3_leaf_modules(asking) == [], "who says that a block is none is heard"
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    exchanges = {}
    for step in range(4):
        given = batches(step, dist.get_world_size())
        for each in (engine, slow):
            hosts = each._parts.sharded.coordinator.schedule._agreement
            before = hosts.exchanges
            each.backward(each(given[dist.get_rank()]))
            each.step()
            exchanges[each is engine] = hosts.exchanges - before
        (sum(plain(batch) for batch in given) / len(given)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert exchanges[True] == 5, "a steady step: begin and end of both passes, and the step"
    assert exchanges[False] > 2 * exchanges[True]
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(safe_get_full_fp32_param(mine), theirs.data, rtol=1e-4, atol=1e-5, msg=name)


@shared_ranks(2)
def test_experts_that_a_rank_alone_holds_need_no_asking():
    """Spread over all ranks, by the layer or by the config: a steady step exchanges as often as a dense model's."""
    for model, section in ((Layers(2, 2, k=1), {}), (StackedModel(), {"enabled": True, "autoep_size": 2})):
        engine, *_ = deepspeed.initialize(model=model, config={**config(), "expert_parallel": section})
        hosts = engine._parts.sharded.coordinator.schedule._agreement
        counts = []
        for step in range(4):
            before = hosts.exchanges
            engine.backward(engine(batches(step, dist.get_world_size())[dist.get_rank()]))
            engine.step()
            counts.append(hosts.exchanges - before)
        assert counts[1:] == [5, 5, 5]
        engine.destroy()


@pytest.mark.usefixtures("with_transformers")
@shared_ranks(2)
def test_a_mixtral_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config_of = transformers.MixtralConfig(
        **sizes, vocab_size=32, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=1
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config_of)
    plain = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, config=config())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    hosts = engine._parts.sharded.coordinator.schedule._agreement
    for step in range(3):
        tokens = torch.randint(0, 32, (2, 1, 3), generator=torch.Generator().manual_seed(step))
        before = hosts.exchanges
        engine.backward(engine(input_ids=tokens[dist.get_rank()], labels=tokens[dist.get_rank()]).loss)
        engine.step()
        count = hosts.exchanges - before
        (sum(plain(input_ids=each, labels=each).loss for each in tokens) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert count == 5
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(safe_get_full_fp32_param(mine), theirs.data, rtol=1e-3, atol=1e-5, msg=name)
