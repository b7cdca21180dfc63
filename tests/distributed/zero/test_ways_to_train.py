"""Ways to train that users have: as at stage 0."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.closeness import Training, assert_same_training
from tests.harness import ranks, shared_ranks
from tests.user_models import WIDTH, CalledTwice, Two, build, run, whole


def train(engine, kind="plain", steps=3):
    before, norms = whole(engine), []
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    for _ in range(steps):
        one, two = torch.randn(2, 4, WIDTH, generator=generator)
        if kind == "no_sync":
            with engine.no_sync():
                engine.backward(engine(one))
            engine.backward(engine(two))
        elif kind == "twice":
            engine.backward(engine(one))
            engine.backward(engine(two))
        elif kind == "sum":
            engine.backward(engine(one) + engine(two))
        elif kind == "coalesce":
            with engine.coalesce_grad_reduction():
                engine.backward(engine(one))
                engine.backward(engine(two))
        elif kind == "bare":
            (engine(one) + engine(two)).backward()
        elif kind == "evaluating":
            with torch.no_grad():
                engine(two)
            engine.eval()
            engine(one)
            engine.train()
            loss = engine(one)
            with torch.no_grad():
                engine(two)
            engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return Training(before, whole(engine), norms=norms)


@pytest.mark.parametrize("kind", ["no_sync", "twice", "sum", "coalesce", "bare", "evaluating"])
@shared_ranks(2)
def test_ways_to_train(kind):
    expected = train(build(CalledTwice, 0), kind)
    for stage in (1, 2, 3):
        assert_same_training(train(build(CalledTwice, stage), kind), expected)


@pytest.mark.parametrize("where", ["engine", "before", "part"])
@ranks(2)
def test_compiled(where):
    def each(step, engine):
        if step == 0 and where == "engine":
            engine.compile(backend="eager")

    class Part(Two):
        def __init__(self):
            super().__init__()
            if where == "part":
                self.first.compile(backend="eager")

    def kind():
        return torch.compile(Two(), backend="eager") if where == "before" else Part()

    expected = run(kind, 0)
    for stage in (1, 2, 3):
        assert_same_training(run(kind, stage, each=each), expected)


@shared_ranks(2)
def test_two_engines_take_turns():
    """As generator and discriminator: one's loss goes through the other."""

    class Maker(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.tanh(self.lin(x))

    def play(stage):
        engines = {"maker": build(Maker, stage), "judge": build(Two, stage)}
        maker, judge = engines.values()
        before = both(engines)
        generator = torch.Generator().manual_seed(30 + dist.get_rank())
        for _ in range(3):
            noise = torch.randn(4, WIDTH, generator=generator)
            judge.backward(judge(maker(noise).detach()))
            judge.step()
            maker.backward(judge(maker(noise)))
            maker.step()
            judge.zero_grad()
        return Training(before, both(engines))

    def both(engines):
        return {f"{name}.{part}": value for name, engine in engines.items() for part, value in whole(engine).items()}

    expected = play(0)
    for stage in (1, 2, 3):
        assert_same_training(play(stage), expected)


@shared_ranks(2)
def test_a_module_that_is_added_later():
    engine = build(Two, 3)
    x = torch.randn(4, WIDTH)
    engine.backward(engine(x))
    engine.step()
    with deepspeed.zero.Init():
        engine.module.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    engine.module.third = nn.Linear(WIDTH, WIDTH)
    with deepspeed.zero.GatheredParameters(list(engine.module.second.parameters())):
        expected = engine.module.second(x)
    assert all(param.numel() == 0 for param in engine.module.second.parameters())
    with torch.no_grad():
        engine(x)
    engine.backward(engine(x))
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.second.parameters())):
        assert torch.equal(engine.module.second(x), expected), "nobody trains it, and nothing else changed it"


@shared_ranks(2)
def test_inference_without_an_optimizer():
    torch.manual_seed(3)
    model = Two()
    x = torch.randn(4, WIDTH)
    expected = model(x)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    assert all(param.numel() == 0 for param in engine.module.parameters())
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(engine(x), expected)
    assert all(param.numel() == 0 for param in engine.module.parameters())
