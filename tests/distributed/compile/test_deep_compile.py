"""DeepCompile trains as plain PyTorch does: every stage, both backends, models as users bring them."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.log import logger
from tests.closeness import Training, assert_same_training
from tests.harness import ranks, shared_ranks
from tests.user_models import ADAMW, MODELS, WIDTH, Odd, Primes, Tied, Two, run, whole

DEEP = {"compile": {"deepcompile": True}}


def compiled(seen=None, *, backend="eager", **kwargs):
    """Compile in front of the first step; `seen` gets what DeepCompile has made."""

    def each(step, engine):
        if step == 0:
            torch._dynamo.reset()
            engine.compile(backend=backend, **kwargs)
            assert engine.is_deepcompile_active()
            if seen is not None:
                seen.append(engine._deep)

    return each


def graphs(deep):
    """The graphs that were captured, over all entries of the schedule."""
    return [captured for compiler in deep.compilers for captured in compiler.captured]


class Broken(nn.Module):
    """A break in the middle of it, a part that is never captured, and a view of a weight that lives on behind both."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.python = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.python.forward = torch.compiler.disable(self.python.forward)

    def forward(self, x):
        turned = self.third.weight.t()
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        x = self.python(torch.tanh(self.second(x)))
        return (x @ turned + self.first.bias).square().mean()


class Repeated(nn.Module):
    """Layers of one class and shape, each of which is captured by itself: what it has is no other one's."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = torch.tanh(self.linear(x))
            torch._dynamo.graph_break()
            return x

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


SOME = ("Two", "Primes", "Tied", "Checkpointed")


class Branching(nn.Module):
    """Chooses by the data, hands on lists, calls a child twice, and never calls another one."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return [self.one(x), None, self.two(x)]

    def __init__(self):
        super().__init__()
        self.parts, self.never, self.last = self.Parts(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        one, _, two = self.parts(x)
        x = torch.tanh(one) + two
        if x.sum() > 0:
            x = self.drop(x) if not self.training else torch.tanh(x)
        one, _, two = self.parts(x)
        return self.last(one * two).square().mean()


@pytest.mark.parametrize("names", [SOME, sorted({*MODELS} - {*SOME, "Sparse"})], ids=["some", "others"])
@shared_ranks(2, compiles=True)
def test_models(names):
    for name in names:
        expected, seen = run(MODELS[name], 0), []
        for stage in (2, 3):
            assert_same_training(run(MODELS[name], stage, config=DEEP, each=compiled(seen)), expected)
            deep = seen[-1]
            assert graphs(deep), name
            assert deep.runs == 8 * len(graphs(deep)), f"{name}: forward and backward of 4 steps run as graphs"


@shared_ranks(2, compiles=True)
def test_gathered_memory_is_bounded_by_the_passes():
    """What is gathered at once is what the passes planned, and less than the model; residents stay."""
    expected, seen, most = run(Primes, 0), [], []

    def each(step, engine):
        compiled(seen, schedule=[(0, ["zero3_compile", "prefetch"]), (2, ["zero3_compile", "selective_gather"])])(
            step, engine
        )
        deep = seen[0]
        if step == 0:
            start = deep.start

            def counted(numbers):
                start(numbers)
                alive = [shard for shard in deep._shards.values() if shard.whole or shard.pending is not None]
                most.append((deep._entry, sum(shard.numel * 4 for shard in alive)))

            deep.start = counted

    assert_same_training(run(Primes, 3, config=DEEP, each=each), expected)
    deep = seen[0]
    peaks = [facts.peak for captured in deep.compilers[0].captured for facts in captured.facts]
    whole = sum(shard.numel * 4 for shard in deep._shards.values())
    assert 0 < max(size for entry, size in most if entry == 0) <= max(peaks) < whole
    assert len(deep.resident) == len(deep._shards), "all of it fits into memory"
    assert not any(
        facts.operations[0][0] == "gather" for facts in deep.compilers[1].captured[0].facts if facts.operations
    )


def two_groups(model):
    """Decayed and not decayed, the last parameter frozen."""
    params = list(model.parameters())
    params[-1].requires_grad_(False)
    wide = [param for param in params if getattr(param, "ds_numel", param.numel()) > WIDTH]
    rest = [param for param in params[:-1] if all(param is not other for other in wide)]
    return [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


COMPOSITIONS = {
    "accumulation": {"config": {"gradient_accumulation_steps": 2}},
    "bf16": {"config": {"bf16": {"enabled": True}}},
    "autocast": {"config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
    "offloaded optimizer": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "groups": {"groups": two_groups},
    "codes": {"zero": {"zero_quantized_weights": True}},
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("stage", [3, 1, 2])
@shared_ranks(2, compiles=True)
def test_compositions(stage, name):
    options, seen = COMPOSITIONS[name], []
    config = {**options.get("config", {}), **DEEP}
    found = run(Two, stage, **{**options, "config": config}, each=compiled(seen))
    assert_same_training(found, run(Two, stage, **options))
    assert seen[-1].runs >= 8


@shared_ranks(2, compiles=True)
def test_evaluation_between_steps_and_hooks_that_come_late():
    def evaluates(step, engine):
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        engine.eval()
        with torch.no_grad():
            losses.append(engine(x).item())
        engine.train()

    for stage in (1, 3):
        losses = []
        expected, told = run(Two, stage, each=evaluates), losses
        losses, compiles = [], compiled()

        def both(step, engine, compiles=compiles):
            compiles(step, engine)
            evaluates(step, engine)

        assert_same_training(run(Two, stage, config=DEEP, each=both), expected)
        assert losses == pytest.approx(told, rel=1e-5)

    def late(step, engine):
        compiled()(step, engine)
        if step == 1:
            next(engine.module.parameters()).register_hook(lambda grad: grad * 2)

    with pytest.raises(UsageError, match=r"register it before engine\.compile"):
        run(Two, 2, config=DEEP, each=late)


@pytest.mark.slow
@ranks(2, compiles=True)
def test_inductor():
    for kind, stage in ((Tied, 1), (Odd, 3)):
        assert_same_training(run(kind, stage, config=DEEP, each=compiled(backend="inductor")), run(kind, 0))


@contextmanager
def log_lines():
    """The texts that are logged inside."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield told
    logger.removeHandler(handler)
    logger.setLevel(before)


def trained(stage, config, each, lengths=(4, 4, 6, 3, 5)):
    """Branching on batches of several lengths, in two groups, with an evaluation before each step."""
    torch.manual_seed(3)
    model = Branching()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "zero_optimization": zero, **config}
    engine = deepspeed.initialize(model=model, model_parameters=two_groups(model), config=config)[0]
    before, losses = whole(engine), []
    generator = torch.Generator().manual_seed(5)  # ranks take the same branches
    for step, length in enumerate(lengths):
        each(step, engine)
        x = torch.randn(length, WIDTH, generator=generator)
        with torch.no_grad():
            losses.append(engine.eval()(x.abs() * -1).item())
        loss = engine.train()(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    after = whole(engine)
    engine.destroy()
    return Training(before, after, losses)


@ranks(2, compiles=True)
def test_branches_lists_and_other_shapes():
    expected = trained(0, {}, lambda *_: None)
    first = Branching.forward.__code__.co_firstlineno
    for stage in (1, 3):
        seen = []
        with log_lines() as told:
            assert_same_training(trained(stage, DEEP, compiled(seen)), expected)
        assert seen[0].runs > 10
        if torch.distributed.get_rank() == 0 and stage == 1:  # each is told once by a process
            assert [text for text in told if f"{__file__}:{first + 3}, which runs in Python" in text], told
            assert [text for text in told if "dynamic shapes" in text and __file__ in text], told


@shared_ranks(2, compiles=True)
def test_what_is_not_captured():
    """It runs in Python, trains the same, and is told once with its line."""
    expected, seen = run(Broken, 0), []
    with log_lines() as told:
        for stage in (1, 3):
            assert_same_training(run(Broken, stage, config=DEEP, each=compiled(seen)), expected)
            assert len(graphs(seen[-1])) > 1
    assert_same_training(run(Repeated, 2, config=DEEP, each=compiled(seen)), run(Repeated, 0))
    assert len(graphs(seen[-1])) >= 3
    if torch.distributed.get_rank() == 0:
        here = f"{__file__}:{Broken.forward.__code__.co_firstlineno + 3}"
        assert len([text for text in told if "which runs in Python" in text and here in text]) == 1, told
