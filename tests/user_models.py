"""Models as users bring them, and training them at any stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from tests.closeness import Training

WIDTH = 6
# Biases of attention's keys and in front of a norm have gradients of zero but for rounding: see [Note: equal bits].
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


class Primes(nn.Module):
    """No size divides by anything: wherever tensors are cut, parts of other sizes come out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 1))

    def forward(self, x):
        return self.layers(x).square().mean()


class CalledTwice(Two):
    def forward(self, x):
        return self.second(self.first(torch.tanh(self.first(x)))).square().mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        ids = (x.abs() * 5).long() % 11
        return self.head(torch.tanh(self.body(self.table(ids)))).square().mean()


class Outside(Two):
    """Uses a parameter of a child without calling the child."""

    def forward(self, x):
        hidden = torch.tanh(nn.functional.linear(x, self.first.weight, self.first.bias))
        return self.second(hidden).square().mean()


class Unused(Two):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(WIDTH, 5)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(WIDTH)), "b": nn.Parameter(torch.zeros(WIDTH))})

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.named["a"] + self.named["b"]
        return x.square().mean()


class Returned(nn.Module):
    """A child hands its bias to its parent, which adds it."""

    class Child(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.eye(WIDTH) * 0.5), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return x @ self.weight, self.bias

    def __init__(self):
        super().__init__()
        self.child, self.last = self.Child(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out, bias = self.child(x)
        return self.last(out + bias).square().mean()


@dataclass
class Output:
    hidden: dict


class Nested(nn.Module):
    class Child(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

        def forward(self, *, batch):
            return Output({"deep": [self.lin(batch["x"]) * self.scale, None, "text"]})

    def __init__(self):
        super().__init__()
        self.child = self.Child()

    def forward(self, x):
        return self.child(batch={"x": x}).hidden["deep"][0].square().mean()


class Odd(nn.Module):
    """Empty and non-contiguous parameters, a scalar, a frozen layer, attention."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH + 1).t())
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        x = self.frozen(x) * self.scalar + self.empty.sum()
        x = x[:, None] + (x @ self.turned.t())[:, :, None][:, :WIDTH]
        return self.attention(x, x, x)[0].square().mean()


class Checkpointed(nn.Module):
    reentrant = False

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.loss(x)

    def loss(self, x):
        return self.head(x).square().mean()


class Reentrant(Checkpointed):
    reentrant = True

    def loss(self, x):
        return sum(checkpoint(self.part, rows, use_reentrant=True) for rows in x.chunk(2)) / 2

    def part(self, rows):
        return nn.functional.linear(rows, self.head.weight, self.head.bias).square().mean()


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(13, WIDTH, sparse=True), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.out(self.table((x.abs() * 6).long() % 13)).square().mean()


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x[:, None]))).mean(-1)).square().mean()


MODELS = {
    kind.__name__: kind
    for kind in (
        Two, Primes, CalledTwice, Tied, Outside, Unused, Lists, Returned, Nested, Odd, Checkpointed, Reentrant, Sparse,
        Conv,
    )
}  # fmt: skip


def run(kind, stage, *, steps=4, optimizer=None, groups=None, config=None, zero=None, each=None):
    """Train on this rank's data."""
    torch.manual_seed(3)
    model = kind()
    made = optimizer(model) if optimizer else None
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=made,
        model_parameters=groups(model) if groups else None,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.5,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "reduce_bucket_size": 40,
                "stage3_prefetch_bucket_size": 50,
                **(zero or {}),
            },
            **({} if made else {"optimizer": ADAMW}),
            **(config or {}),
        },
    )
    before, losses, norms = whole(engine), [], []
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(steps):
        if each:
            each(step, engine)
        x = torch.randn(4, WIDTH, generator=generator)
        loss = engine(x.bfloat16() if config and "bf16" in config else x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
    after = whole(engine)
    engine.destroy()
    return Training(before, after, losses, norms)


def whole(engine):
    """Whole parameters, by name."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def build(kind, stage, **zero):
    torch.manual_seed(3)
    return deepspeed.initialize(
        model=kind(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        },
    )[0]
