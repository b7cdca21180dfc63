"""Layers that are not trained, on some or all places of a pipeline: the same numbers as one process."""

import itertools

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import PipelineError, UsageError
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.harness import ranks

WIDTH = 8


class Layer(nn.Module):
    """A linear layer whose weights are trained in part or not at all."""

    def __init__(self, seed, trained=("weight", "bias"), first=False):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Embedding(11, WIDTH) if first else nn.Linear(WIDTH, WIDTH)
        for name, param in self.inner.named_parameters():
            param.requires_grad_(name in trained)

    def forward(self, x):
        return torch.tanh(self.inner(x))


ALL, NONE, BIAS = ("weight", "bias"), (), ("bias",)
CASES = {
    "some layers": (NONE, ALL, NONE, ALL),
    "parts of layers": (ALL, BIAS, BIAS, ALL),
    "the embedding": (NONE, ALL, ALL, ALL),
    "the first stage": (NONE, NONE, ALL, ALL),
    "the last stage": (ALL, ALL, NONE, NONE),
}


def specs(trained):
    return [LayerSpec(Layer, seed, kinds, seed == 0) for seed, kinds in enumerate(trained)]


def batches(replica, count):
    generator = torch.Generator().manual_seed(replica)
    for _ in range(count):
        yield torch.randint(11, (3,), generator=generator), torch.rand(3, WIDTH, generator=generator)


def expected(trained, count, replicas, steps):
    model = nn.Sequential(*(spec.build() for spec in specs(trained)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        pairs = [pair for replica in range(replicas) for pair in batches(replica, count)]
        loss = sum(nn.functional.mse_loss(model(x), y) for x, y in pairs) / len(pairs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def config(stage, count):
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }


def run(trained, stage, schedule, count, steps=2):
    module = PipelineModule(
        specs(trained), num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform", schedule=schedule
    )
    engine, *_ = deepspeed.initialize(model=module, config=config(stage, count))
    replica, losses = engine._parts.layout["dp"].rank, []
    for _ in range(steps):
        before = float(engine.eval_batch(batches(replica, count)))
        losses.append(float(engine.train_batch(batches(replica, count))))
        assert losses[-1] == pytest.approx(before, abs=1e-6), "nothing changes between the two"
    wanted, end = expected(trained, count, engine._parts.layout["dp"].size, steps)
    assert losses == pytest.approx(wanted, abs=1e-6)
    for name, param in module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.allclose(param, end[name], atol=1e-6, rtol=0), name
    engine.destroy()


@ranks(4, timeout=300)
def test_the_same_as_one_process():
    """Every case at every stage, the schedules and numbers of micro-batches in turn."""
    plays = itertools.cycle([("1f1b", 1), ("zb-h1", 2), ("zbv", 3), ("dualpipev", 4), ("1f1b", 3)])
    for case, stage in itertools.product(CASES, (0, 1, 2, 3)):
        run(CASES[case], stage, *next(plays))


def use_weight(module, x):
    return nn.functional.linear(x, module.inner.weight)


def tied(*trained):
    """The embedding is the head, too, each with its own idea of what is trained."""
    first, last = (
        TiedLayerSpec("shared", Layer, 0, kinds, True, forward_fn=fn, tied_weight_attr="inner.weight")
        for kinds, fn in zip(trained, (None, use_weight), strict=True)
    )
    return PipelineModule([first, LayerSpec(Layer, 1), last], 2, loss_fn=nn.functional.mse_loss)


@ranks(2)
def test_what_cannot_be_trained():
    with pytest.raises(UsageError, match="trained on rank 1 and frozen on rank 0"):
        deepspeed.initialize(model=tied(NONE, ALL), config=config(1, 2))
    engine, *_ = deepspeed.initialize(model=tied(NONE, NONE), config=config(1, 2))
    data = [(x, torch.rand(3, 11)) for x, _ in batches(0, 2)]
    shared = engine.module.tied_modules["shared"].inner.weight
    before = shared.detach().clone()
    assert float(engine.train_batch(iter(data))) > float(engine.train_batch(iter(data)))
    assert torch.equal(shared, before)
    engine.destroy()
    with pytest.raises(UsageError, match="3 layers cannot make 4 stages"):
        PipelineModule(specs(CASES["some layers"])[:3], num_stages=2, schedule="zbv")
    row = PipelineModule([*specs([ALL]), torch.tanh], num_stages=2, partition_method="uniform")
    with pytest.raises(PipelineError, match="pipeline rank 1 has no parameters: stage 0 on pipeline rank 0"):
        deepspeed.initialize(model=row, config=config(1, 2))
