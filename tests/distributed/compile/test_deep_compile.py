"""DeepCompile trains as plain PyTorch does: every stage, both backends, models as users bring them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.log import logger
from tests.closeness import assert_same_training
from tests.harness import ranks
from tests.user_models import MODELS, WIDTH, Odd, Primes, Tied, Two, run

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


SOME = ("Two", "Primes", "Tied", "Checkpointed")


@pytest.mark.parametrize("names", [SOME, sorted({*MODELS} - {*SOME, "Sparse"})], ids=["some", "others"])
@ranks(2, compiles=True)
def test_models(names):
    for name in names:
        expected, seen = run(MODELS[name], 0), []
        for stage in (2, 3):
            assert_same_training(run(MODELS[name], stage, config=DEEP, each=compiled(seen)), expected)
            deep = seen[-1]
            assert graphs(deep), name
            assert deep.runs == 8 * len(graphs(deep)), f"{name}: forward and backward of 4 steps run as graphs"


@ranks(2, compiles=True)
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


@ranks(2, compiles=True)
def test_compositions():
    for number, (name, options) in enumerate(COMPOSITIONS.items()):
        config = {**options.get("config", {}), **DEEP}
        for stage in (1 + number % 2, 3):
            expected = run(Two, stage, **options)
            seen = []
            assert_same_training(run(Two, stage, **{**options, "config": config}, each=compiled(seen)), expected)
            assert seen[-1].runs >= 8, (stage, name)


@ranks(2, compiles=True)
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


@ranks(2, compiles=True)
def test_what_is_not_captured():
    """It runs in Python, trains the same, and is told once with its line."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    expected, seen = run(Broken, 0), []
    for stage in (1, 3):
        assert_same_training(run(Broken, stage, config=DEEP, each=compiled(seen)), expected)
        assert len(graphs(seen[-1])) > 1
    logger.removeHandler(handler)
    logger.setLevel(before)
    if torch.distributed.get_rank() == 0:
        here = f"{__file__}:{Broken.forward.__code__.co_firstlineno + 3}"
        assert len([text for text in told if "which runs in Python" in text and here in text]) == 1, told
