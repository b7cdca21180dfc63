"""Gradient reduction: what users' models do to it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.events import StepFinished
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from tests.harness import shared_ranks
from tests.told import Told

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}


def engine_of(model, lr=1.0, **config):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**CONFIG, **config})[0]


def everywhere(value):
    """The value of every rank."""
    out = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(out, value.detach().contiguous())
    return out


def assert_same_everywhere(module):
    for name, param in module.named_parameters():
        first, *others = everywhere(param)
        for other in others:
            assert torch.equal(first, other), name


class Branches(nn.Module):
    """Rank r uses branch r; `never` is used by nobody."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.branch = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])
        self.never = nn.Linear(4, 4)

    def forward(self, x, which):
        return self.branch[which](self.shared(x)).sum()


@shared_ranks(2, 3)
def test_parameters_that_some_or_all_ranks_do_not_use():
    torch.manual_seed(0)
    model = Branches()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4) * (rank + 1), rank))
        engine.step()
    assert_same_everywhere(model)
    for name, param in model.named_parameters():
        used = name.startswith("shared") or any(name.startswith(f"branch.{r}.") for r in range(world))
        # AdamW decays what has a gradient, even a zero one; what nobody used must not move at all
        assert torch.equal(param, before[name]) is not used, name


@shared_ranks(2)
def test_frozen_then_unfrozen_parameters_train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    engine = engine_of(model, bf16={"enabled": True})
    start = model[0].weight.detach().clone()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()

    def step():
        engine.backward(engine(x).float().sum())
        engine.step()

    step()
    assert torch.equal(model[0].weight, start)
    model[0].requires_grad_(True)
    step()
    assert not torch.equal(model[0].weight, start)
    model[1].requires_grad_(False)
    frozen = model[1].weight.detach().clone()
    step()
    assert torch.equal(model[1].weight, frozen)
    assert_same_everywhere(model)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@shared_ranks(2, 3)
def test_embeddings(sparse, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, sparse=sparse), nn.Linear(3, 1))
    plain = nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 1))
    plain.load_state_dict(model.state_dict())
    engine = engine_of(model, sparse_gradients=rows, gradient_clipping=0.5)
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = [torch.tensor([[0, 1, 1], [7, rank_, 9]]) for rank_ in range(world)]
    engine.backward(engine(tokens[rank]).sum())
    engine.step()
    sum(plain(t).sum() for t in tokens).backward()
    for param in plain.parameters():
        param.grad /= world
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs - theirs.grad)


@shared_ranks(2)
def test_adagrad_updates_the_rows_of_embeddings():
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = [torch.tensor([[0, 1, 1], [7, rank_, 9]]) for rank_ in range(world)]

    def make(sparse):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 3, sparse=sparse), nn.Linear(3, 1))

    plain = make(sparse=False)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(plain(t).square().sum() for t in tokens) / world).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    section = {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}
    offload = {"offload_optimizer": {"device": "cpu"}}
    for stage, more in ((0, {}), (0, offload), (2, offload), (3, offload)):
        model, given = make(sparse=True), None
        if not more:
            given = DeepSpeedCPUAdagrad(model.parameters(), lr=0.1)
        config = {"train_batch_size": world, "gradient_clipping": 0.5, **({} if given else section)}
        config["zero_optimization"] = {"stage": stage, **more}
        engine = deepspeed.initialize(model=model, optimizer=given, config=config)[0]
        for _ in range(2):
            engine.backward(engine(tokens[rank]).square().sum())
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs)
        engine.destroy()


class Recomputed(nn.Module):
    """A block that is called twice under checkpointing, so its gradients may arrive several times."""

    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.reentrant = reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return (self.last(x) + self.block(x).sum()).sum()


@pytest.mark.parametrize("reentrant", [True, False])
@shared_ranks(2)
def test_checkpointed_modules_called_twice(reentrant):
    torch.manual_seed(0)
    model, plain = Recomputed(reentrant), Recomputed(False)
    plain.load_state_dict(model.state_dict())
    engine = engine_of(model, lr=0.01)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    data = [torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    for batch in data:
        engine.backward(engine(batch[dist.get_rank()].clone().requires_grad_()))
        engine.step()
        (sum(plain(part) for part in batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "config",
    [
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 2.0},
        {"communication_data_type": "bf16"},
        {"communication_data_type": "fp32"},
        {},
    ],
)
@shared_ranks(2)
def test_ways_to_scale_and_send(config):
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = engine_of(model, **config)
    engine.backward(engine(torch.ones(1, 3) * (dist.get_rank() + 1)).sum())
    engine.step()
    assert torch.equal(model.weight, torch.full((1, 3), -1.5))


@pytest.mark.parametrize(("op", "expected"), [("mean", -3.0), ("sum", -6.0)])
@shared_ranks(2)
def test_several_backwards_before_a_step(op, expected):
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = engine_of(model, gradient_allreduce_op=op)
    x = torch.ones(1, 3) * (dist.get_rank() + 1)
    for _ in range(2):
        engine.backward(engine(x).sum())
    engine.step()
    assert torch.equal(model.weight, torch.full((1, 3), expected))
    with engine.coalesce_grad_reduction():
        for _ in range(2):
            engine.backward(engine(x).sum())
    engine.step()
    assert torch.equal(model.weight, torch.full((1, 3), 2 * expected))


@shared_ranks(2)
def test_no_sync_accumulates_locally_and_the_next_backward_reduces_all():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = engine_of(model)
    x = torch.ones(1, 2) * (dist.get_rank() + 1)
    with engine.no_sync():
        engine.backward(engine(x).sum())
        assert torch.equal(model.weight.grad, x)
        with pytest.raises(deepspeed.DeepSpeedError, match="leave the context first"):
            engine.step()
        with pytest.raises(deepspeed.DeepSpeedError, match="use one of them"), engine.no_sync():
            pass
    engine.backward(engine(x).sum())
    assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0))
    engine.step()
    assert torch.equal(model.weight, torch.full((1, 2), -3.0))


@shared_ranks(1, 2)
def test_plain_backward_equals_engine_backward():
    results = []
    for style in ("engine", "plain", "mixed"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        engine = engine_of(model, lr=0.1, gradient_accumulation_steps=2)
        for step in range(6):
            x = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(step))[dist.get_rank()]
            loss = engine(x).sum()
            if style == "engine" or (style == "mixed" and step % 2):
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
        results.append([p.detach().clone() for p in model.parameters()])
        engine.destroy()
    for mine, plain, mixed in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain)
        torch.testing.assert_close(mine, mixed)


@shared_ranks(2)
def test_unmanaged_accumulation_reduces_in_step():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = engine_of(model, managed_gradient_accumulation=False)
    x = torch.ones(1, 2) * (dist.get_rank() + 1)
    for _ in range(3):
        engine.backward(engine(x).sum())
    engine.step()
    assert torch.equal(model.weight, torch.full((1, 2), -4.5))
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)


@pytest.mark.parametrize("stage", [0, 2])
@shared_ranks(1, 2)
def test_samples_are_those_that_were_seen(stage, tmp_path):
    config = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 4}
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    per_batch = 2 * dist.get_world_size()
    events = []

    def run(engine, counts):
        for count in counts:
            for place in range(count):
                loss = engine(torch.ones(1, 2)).sum()
                loss.backward() if place % 2 else engine.backward(loss)
            engine.step()

    engine = engine_of(nn.Linear(2, 1), **config, **zero)
    engine.events.subscribe(StepFinished, lambda event: events.append(event.samples))
    run(engine, [4, 1, 3])
    assert events == [4 * per_batch, 5 * per_batch, 8 * per_batch]
    engine.save_checkpoint(tmp_path)
    again = engine_of(nn.Linear(2, 1), **config, **zero)
    again.load_checkpoint(tmp_path)
    run(again, [2])
    assert (again.global_samples, again.global_steps) == (10 * per_batch, 4)


@shared_ranks(1, 2)
def test_samples_of_managed_accumulation():
    engine = engine_of(nn.Linear(2, 1), gradient_accumulation_steps=3)
    for _ in range(7):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    assert (engine.global_samples, engine.global_steps) == (2 * engine.train_batch_size(), 2)
    assert engine.train_batch_size() == 2 * 3 * dist.get_world_size()


@shared_ranks(2)
def test_the_first_rank_decides_how_the_model_begins():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    engine_of(model)
    assert_same_everywhere(model)


@shared_ranks(2)
def test_two_engines_do_not_know_each_other():
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = engine_of(generator, lr=0.1), engine_of(critic, lr=0.1, gradient_accumulation_steps=1)
    start = generator.weight.detach().clone()
    noise = torch.ones(1, 2) * (dist.get_rank() + 1)
    second.backward(second(first(noise).detach()).sum())
    second.step()
    assert torch.equal(generator.weight, start)
    loss = -second(first(noise)).sum()
    loss.backward()
    first.step()
    second.zero_grad()
    assert not torch.equal(generator.weight, start)
    assert_same_everywhere(generator)
    assert_same_everywhere(critic)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@shared_ranks(1, 2)
def test_a_step_drops_gradients_of_parameters_that_joined_the_model(stage):
    model = nn.Linear(4, 1)
    engine = engine_of(model, zero_optimization={"stage": stage}, zero_allow_untested_optimizer=True)
    model.extra = nn.Linear(4, 1)  # not in the optimizer
    batch = torch.ones(2, 4)
    for _ in range(2):
        engine.backward(engine(batch).mean() + model.extra(batch).mean())
        assert model.extra.weight.grad is not None
        engine.step()
        assert model.extra.weight.grad is None


@shared_ranks(1)
def test_a_step_drops_gradients_of_parameters_that_joined_nested_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))
    engine, inner = engine_of(model), model[1][1]

    def step(*more):
        engine.backward(engine(torch.ones(2, 4)).mean() + sum(param.sum() for param in more))
        assert all(param.grad is not None for param in more)
        engine.step()
        return [param.grad is None for param in more]

    step()
    inner.scale = nn.Parameter(torch.ones(2))
    assert step(inner.scale) == [True]
    inner.adapter = nn.Sequential(nn.Linear(4, 1))
    assert step(inner.scale, *inner.adapter.parameters()) == [True] * 3
    inner.scale = nn.Parameter(torch.ones(2))
    assert step(inner.scale) == [True]
    scale = inner.scale
    del inner.scale
    assert step(scale) == [False]  # no parameter of the model any more


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@shared_ranks(1, 2)
def test_autograd_grad_is_no_backward(stage):
    """It adds nothing to the gradients: no micro batch is counted, and no loss had to be scaled."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"managed_gradient_accumulation": False, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    engine = engine_of(model, **config, fp16={"enabled": True})
    batch = torch.ones(2, 4, dtype=torch.half, requires_grad=True)
    with Told() as lines:
        for _ in range(3):
            (found,) = torch.autograd.grad(engine(batch).sum(), batch)
    assert lines == []
    wanted = torch.ones(2, 4, requires_grad=True)
    torch.testing.assert_close(found.float(), torch.autograd.grad(plain(wanted).sum(), wanted)[0], rtol=1e-2, atol=1e-2)
    engine.backward(engine(batch).float().mean())
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (1, 2 * dist.get_world_size())
    if stage < 3:
        loss = engine(batch).float().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(grad is not None for grad in grads)
        assert not engine._parts.backward.has_gradients
    torch.autograd.backward(engine.scale(engine(batch).float().mean()), inputs=list(model.parameters()))
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (2, 4 * dist.get_world_size())
