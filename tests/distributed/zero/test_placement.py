"""Parameters that lie on a part of the ranks, with equal copies on the rest: the same numbers as one process."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.parallel import ParallelLayout
from deepspeed.precision.policy import Precision
from deepspeed.zero.agreement import Hosts
from deepspeed.zero.gradients.council import Council
from deepspeed.zero.gradients.reducer import ShardReducer
from deepspeed.zero.placement import Placement
from deepspeed.zero.states.norm import Measure
from deepspeed.zero.states.planner import Planner
from deepspeed.zero.states.states import States
from tests.harness import ranks

WIDTH = 6


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(4)
def test_shards_over_a_part_of_the_ranks_and_copies_over_the_rest(accumulation):
    """As MiCS does for all parameters; here for one of two layers, beside one that lies on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    plain = copy.deepcopy(model)
    layout = ParallelLayout.build()
    world = layout["dp", "sp"]
    inter, intra = world.split(size=2)
    everywhere, part = Placement(world), Placement(intra, replicate=inter)
    parts = {id(param) for param in model[2].parameters()}
    config = DeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": 20}}
    )
    schema = config.schema
    precision = Precision.from_config(schema)
    names = {id(param): name for name, param in model.named_parameters()}
    planner = Planner(schema, lambda param: part if id(param) in parts else everywhere, precision, names, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = States(optimizer, planner.groups, Measure(world, None, lambda _: False, all_used=False))
    ways, council = planner.ways(world.size, 0), Council(Hosts(world))
    reducer = ShardReducer(lambda: states.groups, planner.reduction_of, ways, council, registered=model.parameters)
    states.reducer = reducer
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    with ExitStack() as stack:
        stack.callback(reducer.close)
        for step in range(3):
            batches = torch.randn(accumulation, 4, 2, WIDTH, generator=torch.Generator().manual_seed(step))
            for micro in range(accumulation):
                reducer.arm()
                (model(batches[micro, dist.get_rank()]).square().mean() / accumulation).backward()
                reducer.settle()
            reducer.conclude()
            states.take_gradients()
            sum(plain(batch).square().mean() for batch in batches.flatten(0, 1)).div(4 * accumulation).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            torch.testing.assert_close(states.norm.wait(), norm, rtol=1e-5, atol=1e-6)
            states.update(optimizer)
            states.publish()
            states.zero_grad()
            reducer.forget()
            expected.step()
            expected.zero_grad()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
