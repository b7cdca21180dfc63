"""Every gradient of every backward reaches the optimizer, from the first step on: compared with plain PyTorch."""

from __future__ import annotations

import copy
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.covering import pairs
from tests.harness import shared_ranks

WIDTH = 6


class Net(nn.Module):
    """Layers of which some may be unused, tied or used twice, and a parameter that the root owns itself."""

    def __init__(self, *parts):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if "unused" in parts:
            self.unused = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.9)) if "owns" in parts else 1.0
        self.last = nn.Linear(WIDTH, WIDTH)
        if "tied" in parts:
            self.third.weight = self.first.weight
        self.twice = "twice" in parts

    def forward(self, x, names=("first", "second", "third")):
        for name in (*names, *names[1:2] * self.twice):
            x = torch.tanh(getattr(self, name)(x))
        return self.last(x * self.gain)


def build(model, stage, *, accumulate=1, threshold=0, trained=nn.Module.parameters, precision=None, **zero):
    plain = copy.deepcopy(model)
    zero |= {"stage": stage, "stage3_param_persistence_threshold": threshold}
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained(model), lr=0.1, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {key: value for key, value in zero.items() if value is not None},
            **({precision: {"enabled": True}} if precision else {}),
        },
    )[0]
    return engine, plain, torch.optim.SGD(trained(plain), lr=0.1, momentum=0.9)


def batch(number, rank):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def compare(engine, plain, case):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for (name, mine), theirs in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda text: f"{case} {name}: {text}")  # noqa: B023


def run_backward(way, engine, loss):
    return engine.backward(loss) if way == "engine" else loss.backward()


CASES = pairs(
    list(product((False, None), (0, 10))),  # overlap_comm, stage3_param_persistence_threshold
    [(), ("unused",), ("owns",), ("unused", "owns")],
    [(), ("tied",), ("twice",), ("tied", "twice")],
    [(1, ("engine",)), (1, ("plain",)), (2, ("engine", "plain")), (2, ("plain", "engine"))],
    ["", "before forward", "before backward", "before step"],
)


@shared_ranks(2)
def test_stage_3_trains_as_one_process_from_the_first_step_on():
    """What is lost in the first backward is missing from then on, so that weights are compared after every step."""
    for case in CASES:
        (overlap, threshold), layers, reuse, (accumulate, ways), looks = case
        torch.manual_seed(1)
        model = Net(*layers, *reuse)
        engine, plain, optimizer = build(model, 3, accumulate=accumulate, overlap_comm=overlap, threshold=threshold)

        def look(when, engine=engine, looks=looks):
            if when == looks:
                engine.eval()
                with torch.no_grad():
                    engine(batch(0, dist.get_rank()))
                engine.train()

        for number in range(2 * accumulate):
            look("before forward")
            loss = engine(batch(number, dist.get_rank())).square().mean()
            look("before backward")
            run_backward(ways[number % len(ways)], engine, loss)
            look("before step")
            engine.step()
            for rank in range(2):
                (plain(batch(number, rank)).square().mean() / (2 * accumulate)).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                assert engine.global_steps == (number + 1) // accumulate, case
                compare(engine, plain, case)
        engine.destroy()


@shared_ranks(2)
def test_what_is_frozen_or_unfrozen_between_micro_steps():
    """Ranks use different layers, so that they have to tell each other who had a gradient of what."""
    used = [[("first", "second", "third"), ("first", "third")], [("second",), ("third", "first")]]
    for stage, (before, after) in product((0, 1, 2, 3), [((), ("first",)), (("first",), ()), (("first",), ("third",))]):
        torch.manual_seed(1)
        engine, plain, optimizer = build(Net(), stage, accumulate=2)
        for number in range(4):
            for name, module in (*engine.module.named_children(), *plain.named_children()):
                module.requires_grad_(name not in (after if number % 2 else before))
            engine.backward(engine(batch(number, dist.get_rank()), used[number % 2][dist.get_rank()]).square().mean())
            engine.step()
            for rank in range(2):
                (plain(batch(number, rank), used[number % 2][rank]).square().mean() / 4).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                compare(engine, plain, (stage, before, after))
        engine.destroy()


@shared_ranks(2)
def test_a_step_leaves_no_gradient_of_what_the_optimizer_does_not_train():
    """Or the first update after `add_param_group` would use the sum of all steps before."""
    for stage, threshold in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 10)):
        torch.manual_seed(1)
        engine, plain, optimizer = build(
            Net(), stage, threshold=threshold, trained=lambda model: model.last.parameters()
        )
        for number in range(4):
            if number == 2:
                engine.optimizer.add_param_group({"params": list(engine.module.first.parameters())})
                optimizer.add_param_group({"params": list(plain.first.parameters())})
            engine.backward(engine(batch(number, dist.get_rank())).square().mean())
            engine.step()
            assert all(param.grad is None for param in engine.module.parameters()), stage
            for rank in range(2):
                (plain(batch(number, rank)).square().mean() / 2).backward()
            optimizer.step()
            plain.zero_grad()
            compare(engine, plain, stage)
        engine.destroy()


@shared_ranks(1, 2)
def test_a_step_that_overflows_leaves_no_gradient_either():
    for stage in (0, 1, 2, 3):
        engine, *_ = build(Net(), stage, precision="fp16", trained=lambda model: model.last.parameters())
        engine.backward(engine(torch.ones(3, WIDTH, dtype=torch.half)).float().sum() * 1e30)
        engine.step()
        assert engine.skipped_steps == 1
        assert all(param.grad is None for param in engine.module.parameters()), stage
        engine.destroy()


class Forces(Net):
    """Differentiates inside of its forward."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = super().forward(x)
        return energy, *torch.autograd.grad(energy.square().sum(), x, create_graph=True)


def penalty(model, call, x):
    x = x.clone().requires_grad_()
    out = call(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + slope.square().mean()


def penalty_of_weights(model, call, x):
    loss = call(x).square().mean()
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


def third_order(model, call, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return bend.square().mean()


def forces(model, call, x):
    return sum(each.square().mean() for each in call(x))


@shared_ranks(2)
def test_stage_3_differentiates_twice():
    cases = [
        (Net, penalty, "engine", {}),
        (Net, penalty, "plain", {"overlap_comm": False}),
        (Net, penalty, "retained", {"stage3_use_all_reduce_for_fetch_params": True}),
        (Net, penalty_of_weights, "plain", {"threshold": 10}),
        (Net, third_order, "plain", {}),
        (Forces, forces, "engine", {}),
    ]
    for kind, loss_of, way, keys in cases:
        torch.manual_seed(1)
        engine, plain, optimizer = build(kind("owns", "twice"), 3, accumulate=2, **keys)
        for number in range(4):
            loss = loss_of(engine.module, engine, batch(number, dist.get_rank()))
            if way == "retained":
                engine.backward(loss / 4, retain_graph=True)
                loss = loss * 3 / 4
            run_backward(way.replace("retained", "engine"), engine, loss)
            engine.step()
            for rank in range(2):
                (loss_of(plain, plain, batch(number, rank)) / 4).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                compare(engine, plain, (loss_of.__name__, way, keys))
                assert engine._parts.sharded.coordinator.schedule.live == 0, "nothing stays whole after a step"
        engine.destroy()


@shared_ranks(2)
def test_gradients_that_were_not_reduced_are_dropped_with_the_others():
    """What a backward inside `no_sync` left is dropped by the optimizer's `zero_grad`, as by the engine's."""
    for stage, threshold in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1000)):
        torch.manual_seed(1)
        engine, plain, optimizer = build(Net(), stage, threshold=threshold)
        with engine.no_sync():
            engine(batch(7, dist.get_rank())).square().mean().backward()
        engine.optimizer.zero_grad()
        engine.backward(engine(batch(0, dist.get_rank())).square().mean())
        engine.step()
        for rank in range(2):
            (plain(batch(0, rank)).square().mean() / 2).backward()
        optimizer.step()
        compare(engine, plain, (stage, threshold))
        engine.destroy()


@shared_ranks(2)
def test_ranks_use_tied_layers_in_opposite_orders():
    """Each rank takes part in gathers for a layer of the other that shares a parameter with its own."""
    torch.manual_seed(1)
    engine, plain, optimizer = build(Net("tied"), 3, stage3_max_reuse_distance=0)
    orders = [("third", "second", "first"), ("first", "second", "third")]
    for number in range(2):
        engine.backward(engine(batch(number, dist.get_rank()), orders[dist.get_rank()]).square().mean())
        engine.step()
        for rank, order in enumerate(orders):
            (plain(batch(number, rank), order).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        compare(engine, plain, number)
