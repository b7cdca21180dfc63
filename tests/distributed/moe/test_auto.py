"""Models of Transformers whose experts are spread by the config train as the unmodified model does."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.stacked_experts import SpreadStack
from deepspeed.utils import safe_get_full_fp32_param
from tests.distributed.moe.models import StackedExperts, StackedModel, batches
from tests.harness import shared_ranks

pytest.importorskip("transformers")


def config(stage=0, size=2, **sections):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"enabled": True, "autoep_size": size, **sections.pop("expert_parallel", {})},
        **sections,
    }


@dataclass(frozen=True)
class Case:
    family: str
    stage: int
    grouped: bool = True
    size: int = 2
    uneven: bool = False


def tokens_of(step, uneven):
    """One batch for each rank."""
    generator = torch.Generator().manual_seed(step)
    world = dist.get_world_size()
    return [torch.randint(1, 32, (1, 5 + (rank if uneven else 0)), generator=generator) for rank in range(world)]


def part_of(name, value, engine):
    """This rank's slice of a value of the whole model."""
    for layer in engine._parts.experts.layers:
        if layer.holds(name):
            return value[layer.first : layer.first + layer.local]
    return value


def check(case):
    from tests.distributed.moe.families import model_of

    model = model_of(case.family)
    compare(case, model, copy.deepcopy(model))


def compare(case, model, plain):
    """Train a model, spread as the case says, beside the unmodified one of the same values."""
    section = {"use_grouped_mm": case.grouped}
    engine, *_ = deepspeed.initialize(model=model, config=config(case.stage, case.size, expert_parallel=section))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(2):
        given = tokens_of(step, case.uneven)
        mine = given[dist.get_rank()]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        losses = [plain(input_ids=each, labels=each).loss for each in given]
        torch.testing.assert_close(loss, losses[dist.get_rank()], rtol=1e-5, atol=1e-6, msg=f"{case}")
        (sum(losses) / len(losses)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(torch.tensor(engine.get_global_grad_norm()), norm, rtol=1e-4, atol=1e-6)
    whole = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        expected = part_of(name, whole[name].data, engine)
        torch.testing.assert_close(
            safe_get_full_fp32_param(param), expected, rtol=1e-4, atol=1e-5, msg=f"{name} in {case}"
        )
    state = engine.zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert set(state) == set(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)
    engine.destroy()


@shared_ranks(2)
def test_families():
    for case in (
        Case("mixtral", 0),
        Case("mixtral", 1, grouped=False, uneven=True),
        Case("mixtral", 3, uneven=True),
        Case("qwen2_moe", 1),
        Case("qwen3_moe", 3, size=1),
        Case("deepseek_v2", 0, uneven=True),
        Case("deepseek_v3", 3),
        Case("olmoe", 2),
        Case("gpt_oss", 1, uneven=True),
        Case("gpt_oss", 3, grouped=False),
        Case("llama4", 0, uneven=True),
        Case("llama4", 3),
    ):
        check(case)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


class Strange(StackedExperts):
    def forward(self, tokens, sizes):
        return tokens


@shared_ranks(2)
def test_what_cannot_be_spread_is_an_error_that_names_the_module():
    def refused(model, **section):
        with pytest.raises(DeepSpeedConfigError) as found:
            deepspeed.initialize(model=model, config=config(expert_parallel=section))
        return str(found.value)

    assert "0.experts cannot be spread: it keeps its experts in no way" in refused(nn.Sequential(Listed()))
    assert "StackedExperts cannot be spread: it is the whole model" in refused(StackedExperts())
    assert "0 cannot be spread: Strange.forward takes neither" in refused(nn.Sequential(Strange()))
    assert "its 3 experts cannot be dealt to 2 ranks" in refused(StackedModel(3))
    assert "Linear has no module of experts: one with num_experts" in refused(nn.Linear(2, 2))
    assert "no module of experts that matches the patterns" in refused(StackedModel(), moe_layer_pattern="layers")
    quantised = StackedModel()
    quantised.experts.down_proj = nn.Parameter(torch.zeros(4, 2, 2, dtype=torch.int8), requires_grad=False)
    assert "experts cannot be spread: down_proj is of dtype torch.int8" in refused(quantised)
    per_expert = StackedModel()
    per_expert.experts.register_buffer("seen", torch.zeros(4))
    assert "its buffer seen has an entry for each expert" in refused(per_expert)
    spread = StackedModel()
    engine, *_ = deepspeed.initialize(model=spread, config=config())
    engine.destroy()
    assert "it is spread already" in refused(spread)
    with pytest.raises(DeepSpeedConfigError, match=r"top_k: a router, or experts, other than the model's own"):
        deepspeed.initialize(model=StackedModel(), config=config(expert_parallel={"top_k": 1}))


@shared_ranks(4)
def test_every_order_of_ranks_and_an_optimizer_of_the_scripts():
    """Own code, an optimizer made before, and ranks that get no token."""
    for data_first, stage in ((False, 1), (True, 0), (True, 3)):
        torch.manual_seed(0)
        model = StackedModel()
        plain = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        made = config(stage, use_data_before_expert_parallelism=data_first)
        del made["optimizer"], made["gradient_clipping"]
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=made)
        assert isinstance(model.experts, SpreadStack)
        assert model.experts.num_experts == 2
        theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
        for step in range(2):
            given = batches(step, 0, tokens=1)
            engine.backward(engine(given[dist.get_rank()]))
            engine.step()
            (sum(plain(batch) for batch in given) / len(given)).backward()
            theirs.step()
            theirs.zero_grad()
        for (name, mine), value in zip(model.named_parameters(), plain.parameters(), strict=True):
            found = safe_get_full_fp32_param(mine)
            torch.testing.assert_close(found, part_of(name, value.data, engine), rtol=1e-4, atol=1e-6, msg=name)
        engine.destroy()
