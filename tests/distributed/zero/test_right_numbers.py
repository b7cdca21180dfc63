"""Neighbours of the usual loop that gave other numbers than one process does: each is compared with plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.errors import CommError, DeepSpeedError
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from tests.harness import shared_ranks

WIDTH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))).square().mean()


def build(stage, model=None, *, steps=1, clipping=0.0, **zero):
    torch.manual_seed(1)
    model = Net() if model is None else model
    plain = copy.deepcopy(model)
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": steps,
            "gradient_clipping": clipping,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        },
    )[0]
    return engine, plain


def batch(step, rank):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def compare(engine, plain):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def step_plain(plain, losses):
    """One SGD step with the mean of all losses of all ranks."""
    (sum(losses) / len(losses)).backward()
    for param in plain.parameters():
        if param.grad is not None:
            param.data.sub_(param.grad, alpha=0.1)
            param.grad = None


def by_parts(engine, x):
    net = engine.module
    return net.last(torch.tanh(net.norm(net.first(x)))).square().mean()


WAYS = {
    "engine": lambda engine, x: engine(x),
    "module": lambda engine, x: engine.module(x),
    "parts": by_parts,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@shared_ranks(1, 2)
def test_a_plain_backward_counts_one_micro_step(stage, way, training):
    engine, plain = build(stage, steps=2)
    engine.train(training)
    world = dist.get_world_size()
    for step in range(3):
        for micro in range(2):
            WAYS[way](engine, batch(2 * step + micro, dist.get_rank())).backward()
            engine.step()
        step_plain(plain, [plain(batch(2 * step + micro, rank)) for micro in range(2) for rank in range(world)])
    compare(engine, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@shared_ranks(2)
def test_the_norm_is_that_of_gradients_that_were_set(stage):
    engine, _ = build(stage, clipping=1.0)
    engine.backward(engine(batch(0, dist.get_rank())))
    values = {}
    for number, (name, param) in enumerate(engine.module.named_parameters()):
        values[name] = torch.full_like(safe_get_full_grad(param), float(number))
        safe_set_full_grad(param, values[name])
    engine.step()
    norm = torch.stack([value.square().sum() for value in values.values()]).sum().sqrt()
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)


class Frozen(nn.Module):
    """A tower whose normalisations and convolutions are not trained, recomputed in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(1, 1, 3, padding=1)
        self.batch = nn.GroupNorm(1, 1)
        self.last = nn.Linear(WIDTH, WIDTH)
        for part in (self.norm, self.mix, self.batch):
            part.requires_grad_(False)

    def block(self, x):
        x = self.norm(self.first(x))
        return self.last(self.batch(self.mix(x.unsqueeze(1))).squeeze(1))

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return checkpoint(self.block, x, use_reentrant=self.reentrant).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@shared_ranks(2)
def test_frozen_weights_are_whole_when_they_are_used_again(reentrant):
    torch.manual_seed(5)
    engine, plain = build(3, Frozen(reentrant))
    for step in range(3):
        engine.backward(engine(batch(step, dist.get_rank()).requires_grad_()))
        engine.step()
        step_plain(plain, [plain(batch(step, rank).requires_grad_()) for rank in range(2)])
    compare(engine, plain)


class Nested(Net):
    def forward(self, x):
        out = super().forward(x)
        for _ in range(9):
            out = [out]
        return out


@pytest.mark.parametrize("stage", [1, 3])
@shared_ranks(2)
def test_outputs_in_many_lists(stage):
    engine, plain = build(stage, Nested(), steps=2)
    for step in range(2):
        for micro in range(2):
            loss = engine(batch(2 * step + micro, dist.get_rank()))
            while isinstance(loss, list):
                loss = loss[0]
            loss.backward()
            engine.step()
        losses = [Net.forward(plain, batch(2 * step + micro, rank)) for micro in range(2) for rank in range(2)]
        step_plain(plain, losses)
    compare(engine, plain)


@shared_ranks(2)
def test_forwards_without_a_backward_are_forgotten():
    engine, _ = build(3)
    coordinator = engine._parts.sharded.coordinator
    for step in range(3):
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()
    hosts = coordinator.schedule._agreement
    before = hosts.exchanges
    for step in range(2):
        for _ in range(5):
            engine(batch(step, dist.get_rank()))
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()
    assert hosts.exchanges - before == 2 * (6 * 2 + 2 + 1), "begin and end of every pass, and the step: none was traced"
    assert len(coordinator._forwards) == 0


@pytest.mark.parametrize("grad", [True, False])
@shared_ranks(2)
def test_a_rank_with_one_forward_more_is_told_on_all(grad):
    engine, _ = build(3)
    for step in range(2):
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()
    with pytest.raises(CommError) as error:
        if dist.get_rank() == 1:
            with torch.set_grad_enabled(grad):
                engine(batch(0, 1))
        engine.backward(engine(batch(2, dist.get_rank())))
        engine.step()
    assert "rank 1" in str(error.value)
    assert "Net" in str(error.value) or "backward" in str(error.value)


@shared_ranks(2)
def test_backward_of_a_part_does_not_meet_another_unit_silently():
    engine, _ = build(1, steps=2)
    engine.backward(engine(batch(0, dist.get_rank())))
    engine.step()
    with pytest.raises(DeepSpeedError, match="one accumulation window"):
        engine.module(batch(1, dist.get_rank())).backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("limit", [10, 10**6])
@shared_ranks(2)
def test_the_norm_of_two_groups_counts_every_gradient_once(stage, limit):
    """Gradients of both groups travel in one bucket."""
    torch.manual_seed(1)
    model = Net()
    plain = copy.deepcopy(model)
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.01,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "reduce_bucket_size": limit,
            },
        },
    )[0]
    for step in range(2):
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()
        if step == 0:
            (sum(plain(batch(0, rank)) for rank in range(2)) / 2).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@shared_ranks(2)
def test_micro_steps_add_up_in_the_dtype_that_was_asked_for(stage):
    """What bf16 would round away: its numbers near 32 are a quarter apart."""
    layer = nn.Linear(4, 1, bias=False)
    engine = deepspeed.initialize(
        model=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )[0]
    for value in (32.0, 0.0625, 0.0625):
        engine.backward(engine(torch.full((1, 4), 3 * value, dtype=torch.bfloat16)).sum())
        if engine.is_gradient_accumulation_boundary():
            assert safe_get_full_grad(next(engine.module.parameters())).tolist() == [[32.125] * 4]
        engine.step()


class Odd(nn.Module):
    """Parameters that are shared, unused, empty, without dims, frozen for a while, or used on one rank only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight = self.first.weight
        self.unused = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, rank):
        x = torch.tanh(self.first(x)) * self.scale
        x = torch.tanh(self.second(x) + self.frozen(x))
        x = self.third(x)
        x = x + self.rare(x) if rank % 2 else x
        return x.square().mean() + self.empty.sum()


def two_groups(model):
    """AdamW whose groups differ in rate and weight decay."""
    groups = [[param for param in model.parameters() if (param.dim() > 1) == wide] for wide in (True, False)]
    options = ({"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.05, "weight_decay": 0.0})
    return torch.optim.AdamW([{"params": params, **each} for params, each in zip(groups, options, strict=True)])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@shared_ranks(2)
def test_odd_parameters_in_two_groups(stage):
    torch.manual_seed(1)
    model = Odd()
    plain = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, optimizer=two_groups(model), config=config)[0]
    optimizer = two_groups(plain)
    trained = {1: {"frozen": True}, 3: {"third": False}, 4: {"third": True}}
    for step in range(5):
        for name, flag in trained.get(step, {}).items():
            for net in (model, plain):
                getattr(net, name).requires_grad_(flag)
        for micro in range(2):
            engine.backward(engine(batch(2 * step + micro, dist.get_rank()), dist.get_rank()))
            engine.step()
        losses = [plain(batch(2 * step + micro, rank), rank) for micro in range(2) for rank in range(2)]
        (sum(losses) / 4).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        compare(engine, plain)
