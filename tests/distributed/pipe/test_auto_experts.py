"""Experts of a Transformers model that is cut into stages, spread by the config over the replicas of each stage."""

import copy

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedError
from deepspeed.moe.stacked_experts import SpreadStack
from deepspeed.pipe import PipelineModule
from tests.harness import ranks, store_path

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("with_transformers")

COUNT = 2


def config(stage, size=2):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"enabled": True, "autoep_size": size},
    }


def batches(step, replica):
    generator = torch.Generator().manual_seed(10 * step + replica)
    for _ in range(COUNT):
        tokens = torch.randint(1, 32, (2, 6), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


def expected(model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(2):
            for batch in batches(step, replica):
                loss = model(**batch, use_cache=False).loss / (2 * COUNT)
                loss.backward()
                total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def compare(engine, end):
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            whole = end[name]
            for layer in engine._parts.experts.layers:
                if layer.holds(name):
                    whole = whole[layer.first : layer.first + layer.local]
            worst = float((param.detach() - whole).abs().max())
            assert worst < 1e-6, f"{name} is {worst} away"


@pytest.mark.parametrize(("stage", "schedule"), [(0, "1f1b"), (1, "zb-h1"), (2, "gpipe"), (3, "1f1b")])
@ranks(4, timeout=300)
def test_the_same_as_one_process(stage, schedule):
    from tests.distributed.moe.families import model_of

    model = model_of("mixtral")
    losses, end = expected(copy.deepcopy(model))
    module = PipelineModule(copy.deepcopy(model), num_stages=2, partition_method="uniform", schedule=schedule)
    engine, *_ = deepspeed.initialize(model=module, config=config(stage))
    assert any(isinstance(each, SpreadStack) for each in module.modules()), "experts of this stage are spread"
    replica = engine._parts.layout["dp"].rank
    found = [float(engine.train_batch(batches(step, replica))) for step in range(2)]
    assert found == pytest.approx(losses, abs=1e-6)
    compare(engine, end)
    engine.save_checkpoint(f"{store_path()}-saved", tag="t")
    engine.destroy()
    for stages in (2, 1):
        again = PipelineModule(copy.deepcopy(model), num_stages=stages, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=again, config=config(stage))
        engine.load_checkpoint(f"{store_path()}-saved", tag="t")
        compare(engine, end)
        engine.destroy()


@ranks(4)
def test_a_stage_without_experts_is_named_on_every_rank():
    from tests.distributed.moe.families import model_of

    module = PipelineModule(model_of("mixtral"), num_stages=2, partition_method="uniform", schedule="zbv")
    with pytest.raises(DeepSpeedError, match=r"has no module of experts.*Every stage of a pipeline needs blocks of"):
        deepspeed.initialize(model=module, config=config(0))
