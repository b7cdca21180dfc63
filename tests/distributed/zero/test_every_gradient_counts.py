"""Every gradient of every backward reaches the optimizer, from the first step on: compared with plain PyTorch."""

from __future__ import annotations

import copy
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.covering import pairs
from tests.harness import ranks

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


def build(model, stage, *, accumulate=1, overlap=None, threshold=0, **config):
    plain = copy.deepcopy(model)
    zero = {"stage": stage, "stage3_param_persistence_threshold": threshold, "overlap_comm": overlap}
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {key: value for key, value in zero.items() if value is not None},
            **config,
        },
    )[0]
    return engine, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)


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


@ranks(2)
def test_stage_3_trains_as_one_process_from_the_first_step_on():
    """What is lost in the first backward is missing from then on, so that weights are compared after every step."""
    for case in CASES:
        (overlap, threshold), layers, reuse, (accumulate, ways), looks = case
        torch.manual_seed(1)
        model = Net(*layers, *reuse)
        engine, plain, optimizer = build(model, 3, accumulate=accumulate, overlap=overlap, threshold=threshold)

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


@ranks(2)
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
