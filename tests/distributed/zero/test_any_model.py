"""Models as users bring them: every stage gives what stage 0 gives, bit for bit on two ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from tests.harness import ranks

WIDTH = 6


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


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
        return self.head(x).square().mean()


class Reentrant(Checkpointed):
    reentrant = True


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
        Two, CalledTwice, Tied, Outside, Unused, Lists, Returned, Nested, Odd, Checkpointed, Reentrant, Sparse, Conv,
    )
}  # fmt: skip


def run(kind, stage, *, steps=4, optimizer=None, groups=None, config=None, zero=None, each=None):
    """Train on this rank's data; whole parameters afterwards, by name."""
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
            **({} if made else {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}),
            **(config or {}),
        },
    )
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(steps):
        if each:
            each(step, engine)
        x = torch.randn(4, WIDTH, generator=generator)
        loss = engine(x.bfloat16() if config and "bf16" in config else x)
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.destroy()
    return found


def same(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if tolerance:
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(found[name], value), (name, (found[name] - value).abs().max())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", list(MODELS))
@ranks(2)
def test_a_model(name):
    optimizer = sgd if name == "Sparse" else None
    # A parameter that was not contiguous is so afterwards, and products with it round otherwise.
    tolerance = 1e-6 if name == "Odd" else 0.0
    expected = run(MODELS[name], 0, optimizer=optimizer)
    for stage in (1, 2, 3):
        same(run(MODELS[name], stage, optimizer=optimizer), expected, tolerance)


KEYS = [
    {"reduce_scatter": False},
    {"overlap_comm": False},
    {"overlap_comm": True},
    {"contiguous_gradients": False},
    {"round_robin_gradients": True},
    {"parameter_alignment": True},
    {"allgather_bucket_size": 20},
    {"reduce_bucket_size": 10**9},
    {"stage3_prefetch_bucket_size": 0},
    {"stage3_prefetch_bucket_size": 10**9},
    {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
    {"stage3_max_live_parameters": 60, "stage3_max_reuse_distance": 10**9},
    {"stage3_max_reuse_distance": 10**9},
    {"stage3_param_persistence_threshold": 10},
    {"stage3_param_persistence_threshold": 10**9},
    {"stage3_param_persistence_threshold": 10**9, "stage3_model_persistence_threshold": 60},
    {"stage3_use_all_reduce_for_fetch_params": True},
    {"stage3_allgather_sequential": True},
    {"stage3_module_granularity_threshold": 10**6},
    {"leaf_module": {"classes": ["torch.nn.modules.container.Sequential"]}},
    {"sub_group_size": 30},
]


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: ",".join(keys))
@ranks(2)
def test_a_key_changes_how_and_not_what(keys):
    expected = run(Checkpointed, 0)
    for stage in (1, 2, 3):
        same(run(Checkpointed, stage, zero=keys), expected)


def two_groups(model):
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights, "weight_decay": 0.3, "lr": 2e-2}, {"params": rest, "weight_decay": 0.0}]


class Averaging(torch.optim.Optimizer):
    """As schedule-free optimizers: state of its own kinds, a counter in the group, no fused kernels."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state.setdefault("z", param.clone())
                state["z"].sub_(param.grad, alpha=group["lr"])
                param.lerp_(state["z"], 1 / group["k"])


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 5, bias=False), nn.Linear(5, WIDTH))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks(2, 3)
def test_muon_sees_whole_matrices(precision):
    config = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}}}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}

    def mark(model):
        for param in model.parameters():
            param.use_muon = param.ndim == 2
        return list(model.parameters())

    expected = run(Matrices, 0, config=config, groups=mark)
    for stage in (1, 2, 3):
        same(run(Matrices, stage, config=config, groups=mark), expected, 1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("kind", ["groups", "averaging", "rprop", "adagrad"])
@ranks(2)
def test_optimizers_and_groups(kind):
    options = {
        "groups": {"groups": two_groups},
        "averaging": {"optimizer": lambda m: Averaging(m.parameters())},
        "rprop": {"optimizer": lambda m: torch.optim.Rprop(m.parameters())},
        "adagrad": {"optimizer": lambda m: torch.optim.Adagrad(two_groups(m), lr=0.1)},
    }[kind]
    expected = run(Tied, 0, **options)
    for stage in (1, 2, 3):
        same(run(Tied, stage, **options), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks(2)
def test_what_is_unfrozen_later_trains(precision):
    def each(step, engine):
        engine.module.first.requires_grad_(step != 0)
        engine.module.second.requires_grad_(step != 2)

    config = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    expected = run(Two, 0, each=each, config=config)
    torch.manual_seed(3)
    assert not torch.equal(expected["first.weight"], Two().first.weight.to(expected["first.weight"]))
    for stage in (1, 2, 3):
        same(run(Two, stage, each=each, config=config), expected)


def train(engine, kind="plain", steps=3):
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
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def build(kind, stage, **zero):
    torch.manual_seed(3)
    return deepspeed.initialize(
        model=kind(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        },
    )[0]


@pytest.mark.parametrize("kind", ["no_sync", "twice", "sum", "coalesce", "bare", "evaluating"])
@ranks(2)
def test_ways_to_train(kind):
    expected = train(build(CalledTwice, 0), kind)
    for stage in (1, 2, 3):
        same(train(build(CalledTwice, stage), kind), expected, 1e-6)


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
        same(run(kind, stage, each=each), expected)


@ranks(2)
def test_two_engines_take_turns():
    """As generator and discriminator: one's loss goes through the other."""

    class Maker(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.tanh(self.lin(x))

    def play(stage):
        maker, judge = build(Maker, stage), build(Two, stage)
        generator = torch.Generator().manual_seed(30 + dist.get_rank())
        for _ in range(3):
            noise = torch.randn(4, WIDTH, generator=generator)
            judge.backward(judge(maker(noise).detach()))
            judge.step()
            maker.backward(judge(maker(noise)))
            maker.step()
            judge.zero_grad()
        found = {}
        for name, engine in (("maker", maker), ("judge", judge)):
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                found |= {f"{name}.{n}": p.detach().clone() for n, p in engine.module.named_parameters()}
        return found

    expected = play(0)
    for stage in (1, 2, 3):
        same(play(stage), expected, 1e-6)


@ranks(2)
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


@ranks(2)
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
            assert torch.equal(engine(x), expected)
    assert all(param.numel() == 0 for param in engine.module.parameters())
